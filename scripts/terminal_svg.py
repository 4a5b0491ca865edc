"""Record commands in a terminal and write them as one animated SVG.

The commands run in a pseudo-terminal; pyte interprets their output, so progress bars and colors look as they do in a
real terminal. Waits are shortened, and a clock shows the real time. The SVG uses CSS animations only (no scripts, no
fonts), so it plays in an <img>; viewers that do not animate, or prefer reduced motion, show the last frame.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

import pyte

CELL_WIDTH, CELL_HEIGHT, MARGIN, TITLE_HEIGHT = 8.4, 19, 16, 34
FONT = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'
BACKGROUND, BAR, BORDER, TEXT, MUTED = "#16181a", "#24282c", "#3d4247", "#e8e6e1", "#a3a8ad"
COLORS = {
    "black": "#6c7378", "red": "#ff8a8a", "green": "#8fce7e", "brown": "#f0b265", "blue": "#7fb4f0",
    "magenta": "#d79bea", "cyan": "#6fcbd0", "white": "#e8e6e1",
}  # fmt: skip
FRAMES_PER_SECOND = 8
TYPING_SECONDS = 0.045
PROMPT, AFTER_COMMAND = b"\x1b[1;32m$\x1b[0m \x1b[1m", b"\x1b[0m\r\n"
"""The command is bold."""

Run = tuple[int, str, str, bool]
"""Column, text, color, bold."""
Row = tuple[Run, ...]


@dataclass(frozen=True)
class Scene:
    """A command line, and how long it is shown."""

    command: str
    seconds: float
    """Length of its output in the recording."""
    longest_wait: float = 1.0
    """Longer waits between two outputs are cut to this, in seconds of real time, before everything is scaled."""
    pause: float = 1.0
    """After its output."""


@dataclass(frozen=True)
class Frame:
    start: float
    rows: tuple[Row, ...]


def run_in_terminal(command: str, folder: Path, columns: int, lines: int) -> list[tuple[float, bytes]]:
    """Run a command in a pseudo-terminal: its output, with the seconds since its start."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(lines)}
    start = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
    )
    os.close(child)
    output: list[tuple[float, bytes]] = []
    while process.poll() is None or select.select([parent], [], [], 0)[0]:
        if not select.select([parent], [], [], 0.1)[0]:
            continue
        try:
            data = os.read(parent, 65536)
        except OSError:  # the last process has closed the terminal
            break
        output.append((time.monotonic() - start, data))
    os.close(parent)
    if process.wait() != 0:
        text = b"".join(data for _, data in output).decode(errors="replace")
        raise SystemExit(f"{command}: exit code {process.returncode}\n{text}")
    return output


def rows_of(screen: pyte.Screen) -> tuple[Row, ...]:
    """The lines of a screen as runs of equal style."""

    def runs(line: int) -> Iterator[Run]:
        cells = [screen.buffer[line][column] for column in range(screen.columns)]
        styled = groupby(range(len(cells)), key=lambda column: (cells[column].fg, cells[column].bold))
        for (color, bold), group in styled:
            columns = list(group)
            text = "".join(cells[column].data for column in columns)
            if stripped := text.rstrip():
                indent = len(stripped) - len(stripped.lstrip())
                fill = COLORS.get(color.removeprefix("bright"), TEXT if color == "default" else f"#{color}")
                yield columns[0] + indent, stripped.lstrip(), fill, bold

    return tuple(tuple(runs(line)) for line in range(screen.lines))


def record(scenes: Sequence[Scene], folder: Path, columns: int, lines: int) -> list[Frame]:
    """Run the scenes one after the other; the last frame has no end."""
    screen = pyte.Screen(columns, lines)
    stream = pyte.ByteStream(screen)
    frames: list[Frame] = []
    now = real = 0.0

    def show() -> None:
        minutes, seconds = divmod(int(real), 60)
        cursor: Row = (
            ((screen.cursor.x, "█", MUTED, False),) if screen.cursor.y < lines and not screen.cursor.hidden else ()
        )
        rows = list(rows_of(screen))
        rows[screen.cursor.y] = rows[screen.cursor.y] + cursor
        clock: Row = ((columns - 15, f"real time {minutes}:{seconds:02}", MUTED, False),)
        frames.append(Frame(now, (*rows, clock)))

    for scene in scenes:
        stream.feed(PROMPT)
        show()
        now += 0.5
        for character in scene.command:
            stream.feed(character.encode())
            show()
            now += TYPING_SECONDS
        now += 0.3
        stream.feed(AFTER_COMMAND)
        output = run_in_terminal(scene.command, folder, columns, lines)
        times = shortened([seconds for seconds, _ in output], scene.longest_wait, scene.seconds)
        start, before = now, real
        # Of the outputs within one frame, the last one is shown.
        slots = [int(moment * FRAMES_PER_SECOND) for moment in times]
        for index, ((seconds, data), moment) in enumerate(zip(output, times, strict=True)):
            stream.feed(data)
            now, real = start + moment, before + seconds
            if slots[index] != (slots[index + 1] if index + 1 < len(slots) else None):
                show()
        show()
        now += scene.pause
    stream.feed(PROMPT)
    show()
    return frames


def shortened(times: Sequence[float], longest_wait: float, seconds: float) -> list[float]:
    """Times with waits of at most `longest_wait`, scaled so that the last one is at most `seconds`."""
    total, previous, moments = 0.0, 0.0, []
    for moment in times:
        total += min(moment - previous, longest_wait)
        previous = moment
        moments.append(total)
    scale = min(1.0, seconds / total) if total else 1.0
    return [moment * scale for moment in moments]


def to_svg(frames: Sequence[Frame], columns: int, lines: int, title: str, hold: float = 4.0) -> str:
    """The frames as an endless loop, in which the last one is shown for `hold` seconds.

    A row that stays the same over several frames is one element. Rows with the same times share an animation.
    """
    duration = frames[-1].start + hold
    groups: dict[tuple[float, float], list[str]] = defaultdict(list)
    for line in range(lines + 1):
        position = (line + 1) * CELL_HEIGHT - 5 + TITLE_HEIGHT + MARGIN / 2 if line < lines else TITLE_HEIGHT - 12
        shown = ((frame.start, frame.rows[line]) for frame in frames)
        intervals = [(next(group)[0], row) for row, group in groupby(shown, key=lambda item: item[1])]
        ends = [*(start for start, _ in intervals[1:]), duration]
        for (start, row), end in zip(intervals, ends, strict=True):
            if row and end > start:
                groups[start, end].append("".join(_text(run, position) for run in row))
    styles, elements = [], []
    for index, ((start, end), texts) in enumerate(sorted(groups.items())):
        first, last = f"{100 * start / duration:.2f}%", f"{100 * end / duration:.2f}%"
        hidden, visible = "{visibility:hidden}", "{visibility:visible}"
        ending = f"to{visible}" if end == duration else f"{last},to{hidden}"
        styles.append(f"@keyframes k{index}{{0%{hidden}{first}{visible}{ending}}}" if start else
                      f"@keyframes k{index}{{0%{visible}{ending}}}")  # fmt: skip
        name = ' class="end"' if end == duration else ""
        elements.append(f'<g{name} style="animation-name:k{index}">{"".join(texts)}</g>')
    return _window("".join(elements), "".join(styles), columns, lines, title, duration)


def _window(content: str, keyframes: str, columns: int, lines: int, title: str, duration: float) -> str:
    width, height = columns * CELL_WIDTH + 2 * MARGIN, lines * CELL_HEIGHT + TITLE_HEIGHT + 1.5 * MARGIN
    style = (
        f"text{{font:14px {FONT};white-space:pre}}.b{{font-weight:700}}"
        f"g{{visibility:hidden;animation:{duration:.2f}s step-end infinite}}g.end{{visibility:visible}}"
        f"@media (prefers-reduced-motion:reduce){{g{{animation:none!important}}}}{keyframes}"
    )
    bar = f"M1 {TITLE_HEIGHT}V10a9 9 0 0 1 9-9h{width - 20:.0f}a9 9 0 0 1 9 9V{TITLE_HEIGHT}z"
    dots = "".join(f'<circle cx="{20 + 18 * index}" cy="17" r="5.5" fill="{BORDER}"/>' for index in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" fill="{TEXT}" role="img" xml:space="preserve">'
        f"<title>{escape(title)}</title><style>{style}</style>"
        f'<rect x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="9" fill="{BACKGROUND}" '
        f'stroke="{BORDER}"/><path d="{bar}" fill="{BAR}"/>{dots}{content}</svg>\n'
    )


def _text(run: Run, position: float) -> str:
    """One run; its length is fixed, so that columns align in any font."""
    column, text, color, bold = run
    fill = f' fill="{color}"' if color != TEXT else ""
    weight = ' class="b"' if bold else ""
    return (
        f'<text x="{MARGIN + column * CELL_WIDTH:.1f}" y="{position:.0f}"{fill}{weight} '
        f'textLength="{len(text) * CELL_WIDTH:.1f}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
    )
