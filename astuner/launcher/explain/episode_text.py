"""An episode's account for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from astuner.launcher.explain.episode import EpisodeExplanation, ExplainedCall, ExplainedFork
from astuner.launcher.explain.run_text import line_of_tokens, print_fixes

_LONGEST_EXCERPT = 48


def print_episode(console: Console, episode: EpisodeExplanation) -> None:
    """Print an episode's account."""
    _print_head(console, episode)
    if episode.calls:
        console.print()
        console.print(_calls_table(episode))
    for call in episode.calls:
        if call.fork is not None:
            _print_fork(console, call, call.fork)
    if episode.timelines:
        console.print()
        console.print(_timelines_table(episode))
    console.print()
    tokens = line_of_tokens(episode.tokens_raw, episode.tokens_distinct, episode.tokens_trained, episode.saving)
    foot = Table.grid(padding=(0, 2))
    foot.add_column(style="bold")
    foot.add_column()
    foot.add_row("tokens", tokens)
    foot.add_row("certificate", _certificate(episode))
    console.print(foot)
    print_fixes(console, episode.fixes)


def _print_head(console: Console, episode: EpisodeExplanation) -> None:
    style = {"ok": "green", "failed": "red"}.get(episode.status, "yellow")
    said = [f"[{style}]{episode.status}[/]"]
    if episode.reward is not None:
        each = ", ".join(f"{agent} {reward:g}" for agent, reward in episode.agent_rewards.items())
        said.append(f"reward {episode.reward:g}" + (f" (the mean of {escape(each)})" if each else ""))
    if episode.is_success is not None:
        said.append("success" if episode.is_success else "no success")
    if episode.advantage is not None:
        apart = bool(episode.agent_rewards) or any(call.reward is not None for call in episode.calls)
        said.append(f"advantage {episode.advantage:+.2f}" + (" (of the mean; calls have their own)" if apart else ""))
    said.append(f"{episode.seconds:.1f} s")
    console.print(f"[bold]{escape(episode.episode_id)}[/]", soft_wrap=True)
    console.print(" · ".join(said))
    console.print(
        escape(f"task {episode.task_id}, repeat {episode.repeat_index}, {episode.split} step {episode.step}"),
        soft_wrap=True,
    )
    if episode.error_kind or episode.error:
        console.print(escape(f"[{episode.error_kind}] {episode.error}"), style=style)
    if episode.withheld:
        console.print("a secret stood in its texts, so the record has no token ids or samples of it", style="yellow")


def _calls_table(episode: EpisodeExplanation) -> Table:
    calls = episode.calls
    with_agents = any(call.agent_name for call in calls)
    with_targets = len({call.target_tag for call in calls}) > 1 or calls[0].target_tag != "default"
    with_rewards = any(call.reward is not None for call in calls)
    with_advantages = any(call.advantage not in (None, episode.advantage) for call in calls)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("call", justify="right")
    if with_agents:
        table.add_column("agent", overflow="fold")
    if with_targets:
        table.add_column("target", overflow="fold")
    if with_rewards:
        table.add_column("reward", justify="right", no_wrap=True)
    if with_advantages:
        table.add_column("advantage", justify="right", no_wrap=True)
    for name in ("prompt", "answer", "ended", "version", "seconds"):
        table.add_column(name, justify="left" if name == "ended" else "right", no_wrap=True)
    table.add_column("goes on from")
    for call in calls:
        table.add_row(
            str(call.call),
            *([escape(call.agent_name)] if with_agents else []),
            *([escape(call.target_tag)] if with_targets else []),
            *(["–" if call.reward is None else f"{call.reward:g}"] if with_rewards else []),
            *(["–" if call.advantage is None else f"{call.advantage:+.2f}"] if with_advantages else []),
            "–" if call.prompt_tokens is None else f"{call.prompt_tokens:,}",
            "–" if call.completion_tokens is None else f"{call.completion_tokens:,}",
            call.finish_reason if call.trained else "not trained",
            str(call.policy_version),
            f"{call.seconds:.2f}",
            _origin(call),
        )
    return table


def _origin(call: ExplainedCall) -> str:
    if call.fork is not None:
        return f"[yellow]fork[/] of {_earlier(call.fork)}"
    if call.extends is not None:
        return f"call {call.extends}"
    return "unknown" if call.shared_tokens is None else "–"


def _print_fork(console: Console, call: ExplainedCall, fork: ExplainedFork) -> None:
    console.print()
    console.print(f"[bold]call {call.call}[/] forks from {_earlier(fork)}: [yellow]{escape(fork.cause)}[/]")
    place = escape(f"messages[{fork.message_index}]")
    console.print(f"  it should extend it, but differs from token {fork.position:,} on, in {place}")
    if fork.expected or fork.found:
        console.print(f"  expected  {escape(_excerpt(fork.expected))}", soft_wrap=True)
        console.print(f"  found     {escape(_excerpt(fork.found))}", soft_wrap=True)


def _earlier(fork: ExplainedFork) -> str:
    return f"call {fork.call}" if fork.call is not None else f"call {escape(fork.call_id)}"


def _excerpt(text: str) -> str:
    cut = text if len(text) <= _LONGEST_EXCERPT else f"{text[:_LONGEST_EXCERPT]}…"
    return repr(cut)


def _timelines_table(episode: EpisodeExplanation) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("timeline", "tokens", "trained", "weight"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("where each call's answer lies")
    for timeline in episode.timelines:
        places = [f"call {span.call or span.call_id} at {span.start:,}–{span.end:,}" for span in timeline.calls]
        table.add_row(
            str(timeline.timeline),
            f"{timeline.tokens:,}",
            f"{timeline.trained:,}",
            f"{timeline.weight:.2f}",
            escape(", ".join(places)),
        )
    return table


def _certificate(episode: EpisodeExplanation) -> str:
    if episode.certificate is None:
        return episode.certificate_note or ""
    style = "green" if episode.certificate == 1.0 else "yellow" if episode.certificate_note else "red"
    said = f"[{style}]{episode.certificate:.2f}[/]: "
    if episode.certificate_note:
        return said + episode.certificate_note
    whole = "the samples rebuild every trained call, token for token"
    return said + (whole if episode.certificate == 1.0 else "a call is not rebuilt by the samples; please report this")
