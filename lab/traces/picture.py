"""A trace as text and as SVG: one line for each span, below its parent, over a common time axis. Pure."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Final

from lab.traces.collector import CollectedSpan

_COLOURS: Final = {
    "kvloom-edge": "#2563eb",
    "kvloom-router": "#7c3aed",
    "kvloom-shard": "#059669",
    "kvloom-safety": "#d97706",
}
_OTHER_COLOUR: Final = "#6b7280"
_ROW: Final = 26
_NAMES_WIDTH: Final = 330
_WIDTH: Final = 980


def in_order(spans: Sequence[CollectedSpan]) -> list[tuple[int, CollectedSpan]]:
    """Return each span with its depth, parents before their children. A span whose parent is missing has depth 0."""
    ids = {span.span_id for span in spans}
    ordered = sorted(spans, key=lambda span: (span.began_at, -span.ended_at))

    def below(parent_id: str, depth: int) -> Iterator[tuple[int, CollectedSpan]]:
        for span in ordered:
            if span.parent_id == parent_id:
                yield depth, span
                yield from below(span.span_id, depth + 1)

    found: list[tuple[int, CollectedSpan]] = []
    for span in ordered:
        if span.parent_id not in ids:
            found += [(0, span), *below(span.span_id, 1)]
    return found


def as_text(spans: Sequence[CollectedSpan]) -> str:
    """Draw a trace for a terminal, with times in milliseconds since its beginning."""
    if not spans:
        return "no spans"
    began_at = min(span.began_at for span in spans)
    lines: list[str] = []
    for depth, span in in_order(spans):
        name = f"{'  ' * depth}{span.service.removeprefix('kvloom-')}: {span.name}"
        at, took = (span.began_at - began_at) * 1e3, (span.ended_at - span.began_at) * 1e3
        error = f"  {span.error}" if span.error else ""
        lines.append(f"{name:<52} {at:9.2f} ms {took:10.2f} ms{error}")
        for event in span.events:
            told = ", ".join(
                f"{key.removeprefix('kvloom.')} {_short(value)}" for key, value in event.attributes.items()
            )
            lines.append(f"{'  ' * depth}    {(event.at - began_at) * 1e3:.2f} ms {event.name}: {told}")
    return "\n".join(lines)


def as_svg(spans: Sequence[CollectedSpan]) -> str:
    """Draw a trace as an SVG document."""
    rows = in_order(spans)
    began_at = min((span.began_at for span in spans), default=0.0)
    length = max((span.ended_at for span in spans), default=1.0) - began_at or 1.0
    height = _ROW * (len(rows) + 1) + 10
    scale = (_WIDTH - _NAMES_WIDTH - 90) / length
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" role="img"><title>A trace over {length * 1e3:.1f} ms</title>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (depth, span) in enumerate(rows):
        y = number * _ROW + 12
        x, width = _NAMES_WIDTH + (span.began_at - began_at) * scale, (span.ended_at - span.began_at) * scale
        colour = "#dc2626" if span.error else _COLOURS.get(span.service, _OTHER_COLOUR)
        name = html.escape(f"{span.service.removeprefix('kvloom-')}: {span.name}")
        parts.append(f'<text x="{8 + depth * 14}" y="{y + 13}" fill="#111827">{name}</text>')
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{max(width, 1.5):.1f}" height="17" rx="3" fill="{colour}"/>')
        took = (span.ended_at - span.began_at) * 1e3
        parts.append(f'<text x="{x + max(width, 1.5) + 5:.1f}" y="{y + 13}" fill="#374151">{took:.1f} ms</text>')
        for event in span.events:
            at = _NAMES_WIDTH + (event.at - began_at) * scale
            parts.append(f'<circle cx="{at:.1f}" cy="{y + 8}" r="4" fill="#facc15" stroke="#111827">'
                         f"<title>{html.escape(event.name)}</title></circle>")  # fmt: skip
    return "\n".join([*parts, "</svg>"]) + "\n"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
