"""The benchmark's pictures as SVG: mean ranks with the critical difference, and what sites gain by their size."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from bcfl.benchmark.leaderboard import Board

WIDTH, LINE = 720, 20  # of a picture, and of a line of words, in its own units
COLOURS = {"gain": "var(--c2, #009e73)", "loss": "var(--c1, #d55e00)"}


def ranks_picture(board: Board) -> str:
    """Contestants on a line of mean ranks, best left; a bar joins those not told apart. Empty without ranks."""
    ranked = sorted((row.rank, row.contestant) for row in board.rows if row.rank is not None)
    if len(ranked) < 2 or board.critical_difference is None:
        return ""
    left, right, top = 150, WIDTH - 150, 46
    worst = max(len(ranked), math.ceil(ranked[-1][0]))

    def at(rank: float) -> float:
        return left + (right - left) * (rank - 1) / max(worst - 1, 1)

    groups = _not_told_apart([rank for rank, _ in ranked], board.critical_difference)
    first = top + 12 + 9 * len(groups)
    half = (len(ranked) + 1) // 2
    parts = [f'<line class="rule" stroke="#888" x1="{left}" x2="{right}" y1="{top}" y2="{top}"/>']
    for tick in range(1, worst + 1):
        parts.append(f'<line stroke="#888" x1="{at(tick):.1f}" x2="{at(tick):.1f}" y1="{top - 5}" y2="{top}"/>')
        parts.append(f'<text x="{at(tick):.1f}" y="{top - 9}" text-anchor="middle">{tick}</text>')
    shown = at(1 + board.critical_difference)
    parts.append(f'<line stroke="currentColor" stroke-width="2" x1="{left}" x2="{shown:.1f}" y1="14" y2="14"/>')
    parts.append(f'<text x="{shown + 6:.1f}" y="18">critical difference {board.critical_difference:.2f}</text>')
    for number, (low, high) in enumerate(groups):
        y = top + 10 + 9 * number
        parts.append(f'<line stroke="currentColor" stroke-width="4" x1="{at(low) - 4:.1f}" x2="{at(high) + 4:.1f}" '
                     f'y1="{y}" y2="{y}"/>')  # fmt: skip
    for place, (rank, name) in enumerate(ranked):
        near, line = place < half, place if place < half else len(ranked) - 1 - place
        y, edge, anchor = first + LINE * line + 8, (left - 8 if near else right + 8), "end" if near else "start"
        parts.append(f'<polyline fill="none" stroke="#888" points="{at(rank):.1f},{top} {at(rank):.1f},{y} '
                     f'{edge},{y}"/>')  # fmt: skip
        parts.append(f'<text x="{edge + (-4 if near else 4)}" y="{y + 4}" text-anchor="{anchor}">{escape(name)} '
                     f"{rank:.1f}</text>")  # fmt: skip
    return _picture(first + LINE * half + 10, "Mean ranks over the tasks, best left", parts)


def _not_told_apart(ranks: Sequence[float], critical: float) -> list[tuple[float, float]]:
    """The longest runs of ranks no further apart than the critical difference; none within another."""
    runs: list[tuple[float, float]] = []
    for first in ranks:
        last = max(rank for rank in ranks if first <= rank <= first + critical)
        if last > first and (not runs or last > runs[-1][1]):
            runs.append((first, last))
    return runs


def gains_picture(rows: Sequence[int], gains: Sequence[float | None], than: str) -> str:
    """A point for each site: its training rows, and how much less it loses than otherwise; above the line it gains."""
    known = [(math.log10(max(size, 1)), gain) for size, gain in zip(rows, gains, strict=True) if gain is not None]
    if not known:
        return ""
    left, right, top, bottom = 56, WIDTH - 12, 12, 190
    low, high = min(size for size, _ in known), max(size for size, _ in known)
    ordered = sorted(abs(gain) for _, gain in known)
    reach = max(ordered[int(0.95 * (len(ordered) - 1))], 1e-3) * 1.1  # a few sites beyond are drawn at the edge

    def at(size: float, gain: float) -> tuple[float, float]:
        share = (size - low) / (high - low) if high > low else 0.5
        return left + (right - left) * share, (top + bottom) / 2 - (bottom - top) / 2 * max(-1, min(1, gain / reach))

    middle = (top + bottom) / 2
    parts = [f'<line stroke="#888" x1="{left}" x2="{right}" y1="{middle}" y2="{middle}"/>']
    parts += [
        f'<text x="{left - 6}" y="{at(low, gain)[1] + 4:.1f}" text-anchor="end">{gain:+.2f}</text>'
        for gain in (reach, 0.0, -reach)
    ] + [
        f'<text x="{at(size, 0)[0]:.1f}" y="{bottom + 16}" text-anchor="middle">{10**size:.0f}</text>'
        for size in sorted({low, (low + high) / 2, high})
    ]
    for size, gain in known:
        x, y = at(size, gain)
        colour = COLOURS["gain" if gain > 0 else "loss"]
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity=".6"/>')
    parts.append(f'<text x="{right}" y="{bottom + 32}" text-anchor="end">training rows of a site (log scale)</text>')
    return _picture(bottom + 40, f"What each site gains over {than}, in nats per row, by its size", parts)


def differences_picture(names: Sequence[str], found: Mapping[str, tuple[float, float, float]], to: str) -> str:
    """A line for each name: the mean difference and its interval, on one scale; left of the middle is better."""
    ends = sorted(max(map(abs, mean_low_high)) for mean_low_high in found.values())
    reach = min(ends[-1], 4 * ends[len(ends) // 2]) if ends else 1.0  # what lies far out is drawn at the edge
    left, right, top = 170, WIDTH - 20, 30

    def at(value: float) -> float:
        return (left + right) / 2 + (right - left) / 2 * max(-1.0, min(1.0, value / (reach or 1.0)))

    bottom = top + LINE * len(names)
    parts = [f'<line stroke="#888" x1="{at(0)}" x2="{at(0)}" y1="{top - 8}" y2="{bottom}"/>']
    parts += [
        f'<text x="{at(value):.1f}" y="{top - 14}" text-anchor="middle">{value:+.2f}</text>'
        for value in (-reach, 0.0, reach)
    ]
    for place, name in enumerate(names):
        y = top + LINE * place + 8
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        if name in found:
            mean, low, high = found[name]
            colour = COLOURS["gain"] if high < 0 else COLOURS["loss"] if low > 0 else "#888"
            parts.append(f'<line stroke="{colour}" stroke-width="2" x1="{at(low):.1f}" x2="{at(high):.1f}" '
                         f'y1="{y}" y2="{y}"/>')  # fmt: skip
            parts.append(f'<circle cx="{at(mean):.1f}" cy="{y}" r="4" fill="{colour}"/>')
    return _picture(bottom + 8, f"Loss beside that of {to}, with 95 % intervals over sites", parts)


def _picture(height: float, title: str, parts: Sequence[str]) -> str:
    """The parts as one picture, which tells its title to those who do not see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="currentColor"><title>{escape(title)}</title>'
        + "".join(parts) + "</svg>"
    )  # fmt: skip
