"""What a step made of its episodes, in one line."""

from __future__ import annotations

from collections.abc import Mapping

_FORKS = "forks/"


def step_line(step: int, metrics: Mapping[str, float]) -> str | None:
    """Return how a step's episodes became trained tokens; None where the metrics are not those of a step.

    For example: step 3: 64 episodes (2 failed), 128 calls → 64 samples, 15,360 → 9,216 distinct → 4,096 trained tokens
    (saving 1.7×), forks: 3 tools_changed
    """
    if "episodes/total" not in metrics:
        return None
    lost = [f"{count:.0f} {name}" for name in ("failed", "dropped") if (count := metrics[f"episodes/{name}"])]
    episodes = _counted(metrics["episodes/total"], "episode") + (f" ({', '.join(lost)})" if lost else "")
    calls = f"{_counted(metrics['calls/total'], 'call')} → {_counted(metrics['samples/total'], 'sample')}"
    tokens = (
        f"{metrics['tokens/raw']:,.0f} → {metrics['tokens/distinct']:,.0f} distinct → "
        f"{metrics['tokens/trained']:,.0f} trained tokens (saving {metrics['tokens/saving']:.1f}×)"
    )
    counts = {name.removeprefix(_FORKS): count for name, count in metrics.items() if name.startswith(_FORKS) and count}
    forks = ", ".join(f"{count:.0f} {cause}" for cause, count in sorted(counts.items(), key=lambda one: -one[1]))
    return f"step {step}: {episodes}, {calls}, {tokens}" + (f", forks: {forks}" if forks else "")


def _counted(count: float, what: str) -> str:
    return f"{count:,.0f} {what}" + ("" if count == 1 else "s")
