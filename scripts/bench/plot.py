"""The growth of scale.py as an SVG: plain text, one panel for each figure over the number of
sessions. Used by scale.py."""

import math

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 200, 70, 40, 90
# Key of a point, title, factor.
PANELS = [
    ("attach_ms", "attach, ms", 1),
    ("server_cores", "idle server, % of a core", 100),
    ("session_kib", "memory per session, KiB", 1),
]
COLORS = [("now", "#1f6feb"), ("before", "#a0a0a0")]


def nice(top):
    """A round number that is not below."""
    if top <= 0:
        return 1.0
    step = 10 ** math.floor(math.log10(top))
    return next(step * k for k in (1, 2, 5, 10) if step * k >= top * 0.999)


def label(value):
    return f"{value:g}"


def panel(number, key, title, factor, series):
    """One panel; `series` are (name, color, points)."""
    x0, y0 = LEFT + number * (WIDTH + GAP), TOP
    counts = sorted({p["sessions"] for _, _, points in series for p in points})
    last = math.log10(max(counts[-1], 10))

    def x(count):
        return x0 + WIDTH * math.log10(max(count, 1)) / last

    top = nice(max(p[key] * factor for _, _, points in series for p in points))

    def y(value):
        return y0 + HEIGHT * (1 - max(value, 0) * factor / top)

    out = [f'<text x="{x0}" y="{y0 - 14}" font-weight="bold">{title}</text>']
    for k in range(5):
        at = y0 + HEIGHT * k / 4
        out.append(f'<line x1="{x0}" y1="{at:.1f}" x2="{x0 + WIDTH}" y2="{at:.1f}" '
                   'stroke="#ddd"/>')
        out.append(f'<text x="{x0 - 6}" y="{at + 4:.1f}" text-anchor="end">'
                   f'{label(top * (4 - k) / 4)}</text>')
    for count in counts:
        out.append(f'<text x="{x(count):.1f}" y="{y0 + HEIGHT + 18}" text-anchor="middle">'
                   f'{count}</text>')
    for _, color, points in series:
        line = " ".join(f"{x(p['sessions']):.1f},{y(p[key]):.1f}" for p in points)
        out.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        for p in points:
            out.append(f'<circle cx="{x(p["sessions"]):.1f}" cy="{y(p[key]):.1f}" r="3" '
                       f'fill="{color}"/>')
    return out


def svg(result, before=None):
    """The plot of a result, beside an earlier one."""
    series = []
    for (name, color), one in zip(COLORS, (result, before)):
        points = (one or {}).get("growth", {}).get("points")
        if points:
            series.append((name, color, points))
    width = LEFT + len(PANELS) * (WIDTH + GAP)
    height = TOP + HEIGHT + 60
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
           'font-family="sans-serif" font-size="12">',
           f'<rect width="{width}" height="{height}" fill="#fff"/>']
    if series:
        for number, (key, title, factor) in enumerate(PANELS):
            out += panel(number, key, title, factor, series)
    at = LEFT
    for name, color, _ in series:
        out.append(f'<rect x="{at}" y="{height - 22}" width="12" height="12" fill="{color}"/>')
        out.append(f'<text x="{at + 18}" y="{height - 12}">{name}</text>')
        at += 90
    out.append(f'<text x="{at + 20}" y="{height - 12}" fill="#666">over the number of sessions, '
               'logarithmic</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"
