"""Episode transcripts, folded to the terminal's width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from astuner.errors import shorten
from astuner.run_record.episode_file import common_prefix_len
from astuner.schema import Episode, LlmCall, Message
from astuner.system.control_characters import escape_control_characters
from astuner.system.redaction.redactor import redact

Shown = int | Literal["all", "none"]
"""Number of transcripts per task, or all in full, or none."""

DEFAULT_SHOWN = 2
_HEAD_LINES, _TAIL_LINES = 8, 3
_MAX_MESSAGES = 24
_SEARCHED_CALLS = 8  # as in the run record's search for shared messages
_LABEL_WIDTH = 11
_MIN_WIDTH = 24
_ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def select_episodes(episodes: Sequence[Episode], shown: Shown) -> list[tuple[str, Episode]]:
    """Return the episodes of each task whose transcripts are shown, each with its place among the task's episodes.

    Args:
        episodes: the episodes of a batch.
        shown: 1 selects the best episode of each task by reward, 2 the best and the worst, and a larger number further
            ones with rewards between them. Episodes without a reward come last.
    """
    if shown == "none":
        return []
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.task.task_id, []).append(episode)
    selected = []
    for group in groups.values():
        ranked = sorted(group, key=lambda episode: inf if episode.reward is None else -episode.reward)
        count = len(ranked) if shown == "all" else min(shown, len(ranked))
        # Evenly spaced, from the best to the worst.
        places = [round(index * (len(ranked) - 1) / max(count - 1, 1)) for index in range(count)]
        if shown == DEFAULT_SHOWN and _conversation(ranked[0]) == _conversation(ranked[-1]):
            places = places[:1]
        selected += [(_place_name(ranked, place), ranked[place]) for place in places]
    return selected


def _conversation(episode: Episode) -> list[tuple[Message, ...]]:
    return [call.messages for call in episode.calls]


def _place_name(ranked: Sequence[Episode], place: int) -> str:
    if len(ranked) == 1:
        return "the only episode"
    if ranked[0].reward == ranked[-1].reward:
        return f"one of {len(ranked)} episodes with the same reward"
    if place in (0, len(ranked) - 1):
        return f"{'worst' if place else 'best'} of {len(ranked)} episodes"
    return f"number {place + 1} of {len(ranked)} episodes"


class EpisodeTranscript:
    """The messages of an episode, as an object that rich renders.

    Each message is shown once: a call that continues an earlier one adds its new messages only.
    """

    def __init__(self, heading: str | None, episode: Episode, *, is_folded: bool = True) -> None:
        """Create the transcript.

        Args:
            heading: the beginning of the first line, before reward and task; None for no such line.
            episode: what to show.
            is_folded: whether long messages and long conversations lose their middle.
        """
        self._heading = heading
        self._episode = episode
        self._is_folded = is_folded

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the transcript."""
        width = max(options.max_width, _LABEL_WIDTH + _MIN_WIDTH)
        episode = self._episode
        if self._heading is not None:
            head = Text("── ", style="dim")
            # The reward comes first, because a long id is cut at the width.
            outcome: str = episode.status
            if episode.reward is not None:
                solved = {None: "", True: ", solved", False: ", not solved"}[episode.is_success]
                outcome = f"reward {episode.reward:.2f}{solved}"
            style = "bold green" if episode.is_success else "bold"
            head.append(f"{self._heading}, {outcome}", style=style if episode.status == "ok" else "bold red")
            head.append(f"  {escape_control_characters(shorten(episode.task.task_id, 60))}", style="dim")
            head.truncate(width, overflow="ellipsis")
            yield head
        lines = list(_new_messages(episode.calls))
        if not lines:
            lines = [("user", {"role": "user", "content": episode.task.main_query})]
        left_out = len(lines) - _MAX_MESSAGES if self._is_folded else 0
        for index, (label, message) in enumerate(lines):
            if left_out > 0 and index == _MAX_MESSAGES // 2:
                yield Text(f"{'':{_LABEL_WIDTH}}… {left_out} messages …", style="dim")
            if left_out <= 0 or not _MAX_MESSAGES // 2 <= index < _MAX_MESSAGES // 2 + left_out:
                style = _ROLE_STYLES.get(str(message.get("role")), "")
                if reasoning := message.get("reasoning_content"):
                    yield from self._text_lines("thinking", str(reasoning), "dim", "dim italic", width)
                for number, (text, text_style) in enumerate(_parts(message)):
                    yield from self._text_lines("" if number else label, text, style, text_style, width)
        if episode.error is not None:
            yield from self._text_lines("error", f"[{episode.error_kind}] {episode.error}", "red", "red", width)

    def _text_lines(self, label: str, text: str, label_style: str, style: str, width: int) -> Iterator[Text]:
        room = width - _LABEL_WIDTH
        lines = [
            piece
            for line in escape_control_characters(redact(text)).expandtabs(4).splitlines() or [""]
            for piece in textwrap.wrap(line, room, drop_whitespace=False, replace_whitespace=False) or [""]
        ]
        left_out = len(lines) - _HEAD_LINES - _TAIL_LINES
        if self._is_folded and left_out > 1:
            lines = [*lines[:_HEAD_LINES], f"… {left_out} lines …", *lines[-_TAIL_LINES:]]
        # A long name of an agent gets a separate line.
        if len(label) >= _LABEL_WIDTH:
            yield Text(label[:width], style=f"bold {label_style}")
            label = ""
        for line in lines:
            row = Text(f"{label:{_LABEL_WIDTH}}", style=f"bold {label_style}")
            row.append(line.rstrip(), style=style or "not bold default")
            yield row
            label = ""


def print_transcripts(console: Console, episodes: Sequence[Episode], shown: Shown) -> None:
    """Print the transcripts of each task's selected episodes (see `select_episodes`)."""
    for heading, episode in select_episodes(episodes, shown):
        console.print(EpisodeTranscript(heading, episode, is_folded=shown != "all"))
        console.print()


def _new_messages(calls: Sequence[LlmCall]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the messages that no earlier call has, each with the name of its speaker."""
    agents = {call.agent_name for call in calls if call.agent_name}
    for index, call in enumerate(calls):
        searched = calls[max(index - _SEARCHED_CALLS, 0) : index]
        earlier = [common_prefix_len(call.messages, other.messages) for other in searched]
        for message in call.messages[max(earlier, default=0) :]:
            role = str(message.get("role", "message"))
            is_named = role == "assistant" and len(agents) > 1 and call.agent_name
            yield escape_control_characters(call.agent_name if is_named else role), message


def _parts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the texts of a message with their styles: content and tool calls."""
    calls = message.get("tool_calls") or ()
    content: object = message.get("content")
    if isinstance(content, list | tuple):
        texts = (part.get("text") or f"[{part.get('type', 'part')}]" for part in content if isinstance(part, Mapping))
        content = "\n".join(map(str, texts))
    content = "" if content is None else str(content)
    if content or not calls:
        yield content or "(empty)", "" if content else "dim"
    for call in calls if isinstance(calls, Iterable) else ():
        function = call.get("function", {}) if isinstance(call, Mapping) else {}
        yield f"→ {function.get('name', '?')} {function.get('arguments', '')}", "yellow"
