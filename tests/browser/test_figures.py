"""Speed and smoothness in the page, reported in test-output/figures.json. Long; counts are asserted, times are not."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .lab import Lab


def spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "frames": len(ordered),
        "median_ms": statistics.median(ordered),
        "p95_ms": ordered[int(0.95 * (len(ordered) - 1))],
        "p99_ms": ordered[int(0.99 * (len(ordered) - 1))],
        "longest_ms": ordered[-1],
    }


@contextlib.contextmanager
def traced(lab: Lab) -> Iterator[list[dict[str, Any]]]:
    """Events of the browser's own timeline while inside; filled at the end."""
    session = lab.page.context.new_cdp_session(lab.page)
    events: list[dict[str, Any]] = []
    over: list[bool] = []
    session.on("Tracing.dataCollected", lambda part: events.extend(part["value"]))
    session.on("Tracing.tracingComplete", lambda _: over.append(True))
    config = {"includedCategories": ["devtools.timeline", "disabled-by-default-devtools.timeline"]}
    session.send("Tracing.start", {"transferMode": "ReportEvents", "traceConfig": config})
    yield events
    session.send("Tracing.end")
    lab.until(lambda: over)
    session.detach()


@pytest.mark.tier("N")
@pytest.mark.parametrize("tokens", [5000])
def test_a_long_fast_answer_keeps_the_page_smooth_and_the_notebook_small(lab: Lab, figures: Callable[..., None], tokens: int) -> None:
    setup = "import scripted; scripted.use(scripted.plain_words, step_s=0.01)"
    notebook = lab.new([f"%%mlx --max-tokens {tokens}\n{tokens} words"], setup=setup)
    before = len(notebook.file.read_bytes())
    with lab.frames() as times:
        notebook.start(0)
        notebook.wait_idle(0, 240)
    messages = notebook.messages()
    seconds = (messages["at"][-1] - messages["at"][0]) / 1000
    notebook.wait_end(0)
    notebook.save()
    grew = len(notebook.file.read_bytes()) - before
    told = sum(kind != "status" for kind in messages["kinds"])
    figures(
        "5,000 tokens at up to 100 tok/s",
        **spread(times),
        messages_per_s=round(told / seconds, 1),
        with_status_per_s=round(len(messages["kinds"]) / seconds, 1),
        notebook_grew_bytes=grew,
        seconds=round(seconds, 1),
    )
    assert told / seconds <= 25
    assert grew <= 80_000


@pytest.mark.tier("N")
@pytest.mark.parametrize("options", ["", "--view tokens --logprobs 3"], ids=["answers", "tokens"])
def test_fifty_outputs_in_one_notebook_scroll(lab: Lab, figures: Callable[..., None], options: str) -> None:
    """What is laid out and styled at once is one output at most, however many there are. Frame times depend on the machine."""
    notebook = lab.new([f"%%mlx {options}\n200 words"] * 50, setup="import scripted; scripted.use(scripted.words)")
    notebook.run_all()
    lab.until(lambda: notebook.ended(49))
    script = """
    async ([path]) => {
      const node = window.__nb.panel(path).content.node.querySelector(".jp-WindowedPanel-outer") || window.__nb.panel(path).content.node;
      node.scrollTop = 0;
      const height = node.scrollHeight;
      for (let y = 0; y < height; y += 40) { node.scrollTop = y; await new Promise(requestAnimationFrame); }
      return [height, node.scrollTop];
    }"""
    with traced(lab) as events, lab.frames() as times:
        height, reached = lab.page.evaluate(script, [notebook.path])
    assert reached > 0.5 * height > 2000
    layouts = [event["args"].get("beginData", {}).get("dirtyObjects", 0) for event in events if event["name"] == "Layout"]
    styles = [event["args"].get("elementCount", 0) for event in events if event["name"] == "UpdateLayoutTree"]
    ours = sum(event["name"] == "FunctionCall" and "/mlxnb/" in str(event["args"].get("data", {}).get("url")) for event in events)
    assert len(layouts) > 50 and len(styles) > 50, "nothing was traced"
    counts = {"most_laid_out": max(layouts), "most_styled": max(styles), "calls_of_our_scripts": ours}
    kind = "token views" if options else "answers"
    figures(f"scrolling past 50 {kind}", **spread(times), **counts, pixels=height)
    assert max(layouts) <= 400 and max(styles) <= 400, counts
