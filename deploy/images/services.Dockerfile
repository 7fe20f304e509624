# The services without an engine: edge, router, safety, control, orchestrator, scaler. From the repository's root:
#   docker build -f deploy/images/services.Dockerfile -t kvloom-services .
FROM python:3.13.9-slim-trixie AS build
WORKDIR /build
RUN python3 -m venv /opt/builder && /opt/builder/bin/pip install --no-cache-dir hatchling==1.33.0 grpcio-tools==1.85.1 cyclonedx-bom==7.5.0
COPY pyproject.toml hatch_build.py README.md LICENSE constraints.txt ./
COPY protos protos
COPY kvloom kvloom
COPY kvloom_common kvloom_common
COPY edge_http edge_http
COPY router router
COPY safety_svc safety_svc
COPY shard_server shard_server
COPY control control
COPY orchestrator orchestrator
COPY tools tools
COPY fabric fabric
# Without isolation: the build takes the generator installed above.
RUN /opt/builder/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /build/wheels . ./fabric
RUN python3 -m venv /opt/kvloom && /opt/kvloom/bin/pip install --no-cache-dir --constraint constraints.txt --find-links /build/wheels "kvloom-fabric[search,gateway]"
RUN /opt/builder/bin/cyclonedx-py environment --output-format JSON --output-file /opt/kvloom/sbom.json /opt/kvloom/bin/python
RUN /opt/kvloom/bin/kvloom --version && /opt/kvloom/bin/python -m kvloom_fabric router --help

FROM python:3.13.9-slim-trixie
COPY --from=build /opt/kvloom /opt/kvloom
RUN useradd --uid 10001 --no-create-home --home-dir /var/lib/kvloom kvloom && install -d -o 10001 -g 10001 -m 0700 /var/lib/kvloom
USER 10001:10001
# The root may be read-only: everything that is written is below these two.
ENV PATH=/opt/kvloom/bin:/usr/bin:/bin HOME=/var/lib/kvloom TMPDIR=/tmp KVLOOM_DATA_DIR=/var/lib/kvloom PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
VOLUME ["/var/lib/kvloom", "/tmp"]
EXPOSE 8080 8081
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s --retries=3 CMD ["kvloom", "status", "--local"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvloom"]
CMD ["up"]
