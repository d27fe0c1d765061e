"""Plots the results of scale.py as an SVG: one panel per figure, over the number of sessions."""

import math

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 200, 70, 40, 90
# Key of a point, title, factor.
PANELS = [("attach_ms", "attach, ms", 1), ("server_cores", "idle server, % of a core", 100),
          ("session_kib", "memory per session, KiB", 1)]
COLORS = ("now", "#1f6feb"), ("before", "#a0a0a0")


def text(x, y, words, more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{words}</text>'


def top_of(value):
    """Returns a round number that is not below the value."""
    step = 10 ** math.floor(math.log10(max(value, 0.1)))
    return next(step * k for k in (1, 2, 5, 10) if step * k >= value * 0.999)


def panel(left, key, title, factor, series):
    """Returns a panel of series (color, points)."""
    counts = sorted({point["sessions"] for _, points in series for point in points})
    top = top_of(max(point[key] * factor for _, points in series for point in points))

    def x(count):
        return left + WIDTH * math.log10(count) / math.log10(max(counts[-1], 10))

    def y(value):
        return TOP + HEIGHT * (1 - max(value, 0) / top)
    out = [text(left, TOP - 14, title, 'font-weight="bold"')]
    for value in (top * k / 4 for k in range(5)):
        out += [f'<line x1="{left}" y1="{y(value):.1f}" x2="{left + WIDTH}" y2="{y(value):.1f}" '
                'stroke="#ddd"/>', text(left - 6, y(value) + 4, f"{value:g}", 'text-anchor="end"')]
    out += [text(x(count), TOP + HEIGHT + 18, count, 'text-anchor="middle"') for count in counts]
    for color, points in series:
        places = [(x(point["sessions"]), y(point[key] * factor)) for point in points]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        out.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>' for a, b in places]
    return out


def svg(result, before):
    """Returns the plot of a result beside the plot of an earlier result."""
    width, height = LEFT + len(PANELS) * (WIDTH + GAP), TOP + HEIGHT + 60
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
           'font-family="sans-serif" font-size="12">',
           f'<rect width="{width}" height="{height}" fill="#fff"/>']
    series = []
    for (name, color), one in zip(COLORS, (result, before)):
        if "growth" in one:
            at = LEFT + 90 * len(series)
            series.append((color, one["growth"]["points"]))
            out += [f'<rect x="{at}" y="{height - 22}" width="12" height="12" fill="{color}"/>',
                    text(at + 18, height - 12, name)]
    for number, (key, title, factor) in enumerate(PANELS if series else []):
        out += panel(LEFT + number * (WIDTH + GAP), key, title, factor, series)
    out += [text(LEFT + 200, height - 12, "over the number of sessions, logarithmic",
                 'fill="#666"'), "</svg>"]
    return "\n".join(out) + "\n"
