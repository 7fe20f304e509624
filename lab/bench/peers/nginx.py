"""nginx as a plain proxy: the cost of a gateway that inspects nothing."""

from __future__ import annotations

from collections.abc import Sequence

from lab.bench.peers.peer import Peer, Site


def _argv(site: Site) -> Sequence[str]:
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in site.worker_urls)
    path = site.work_dir / "nginx.conf"
    path.write_text(
        f"""worker_processes 1; daemon off; pid {site.work_dir}/nginx.pid; error_log stderr error;
events {{ worker_connections 16384; }}
http {{
  access_log off; client_max_body_size 1m; client_body_buffer_size 128k; keepalive_requests 1000000;
  client_body_temp_path {site.work_dir}/body; proxy_temp_path {site.work_dir}/proxy;
  fastcgi_temp_path {site.work_dir}/fastcgi; uwsgi_temp_path {site.work_dir}/uwsgi; scgi_temp_path {site.work_dir}/scgi;
  upstream workers {{ {servers} keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{site.port} backlog=4096;
    location / {{
      proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
"""
    )
    return (str(site.bin_dir / "nginx"), "-p", str(site.work_dir), "-e", "stderr", "-c", str(path))


NGINX = Peer(name="nginx", about="plain proxy", program="nginx", debian_package="nginx", argv=_argv)
