"""W4, W6 and W7: the first token of prompts that were computed before, in whole or in part. CPU, default model.

    python engine/benchmarks/reuse.py [--rounds 5] [--only W4|W6] [--out DIR]

W4: a chat of ten turns, then its last question again (re-run), another question after turn 8 (fork), a changed question 5 (edit), and
the next question in a new process (restart). mlx-lm answers the same questions twice: with its own prompt cache, used as its server
uses it (`LRUPromptCache`: nearest entry, trimmed), and without one. Every side continues its own greedy answers; the arms alternate
by round. W6: a run of 2k tokens asked again, and branched at 90 % of it, against reading the same ids with an empty cache.
W7: 4k tokens from disk in a new process, against reading them there with an empty cache.
Times are from submit to first token. Reused tokens are counted, not timed. Writes reuse.json and reuse.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import facts
from worker import text_of

ANSWER, SYSTEM = 24, 60
"""Tokens of an answer; words of the system message."""
EVENTS = ("turn", "re-run", "fork", "edit", "restart")
AIMS = {"none": 20.0, "mlx-lm": 1.0, "W6": 15.0, "W7": 10.0}


# -- the sides, each in a process of its own -----------------------------------------------------------------------------------


class Ours:
    """This engine through the Python API, its disk tier in a folder of the benchmark's own."""

    def __init__(self) -> None:
        import mlxnb

        self._mlxnb = mlxnb
        self.model = mlxnb.load()
        self.model.generate("warm", max_tokens=2)

    def _seen(self, run: Any, given: int = 0) -> dict[str, Any]:
        """given: tokens that the run began with; the first new one is timed."""
        run.result()
        usage = run.usage
        details = usage["prompt_tokens_details"]
        return {
            "seconds": next(e.t for e in run.generation.read() if e.kind == "tokens" and (given := given - len(e.tokens)) < 0),
            "prompt": usage["prompt_tokens"],
            "reused": details["cached_tokens"],
            "disk": details.get("ssd_tokens", 0),
        }

    def chat(self, job: dict[str, Any]) -> dict[str, Any]:
        """Ten turns and the four events after them; the tree goes to a file for the restart."""
        settings: dict[str, Any] = {"max_tokens": ANSWER, "temp": 0.0}
        chat = self.model.chat(system=text_of(SYSTEM, job["seed"]))
        runs = [chat.send(question(job, i), **settings) for i in range(job["turns"])]
        ids = [turn.id for turn in chat.turns]
        answers = {"turn": runs[-1]}
        answers["re-run"] = chat.regenerate(chat.head, **settings)
        answers["fork"] = chat.send(question(job, 90), after=ids[7], **settings)
        answers["edit"] = chat.send(question(job, 91), after=ids[3], **settings)
        chat.head = ids[-1]
        Path(job["file"]).write_text(chat.to_json())
        receipt = self._mlxnb.cache_flush()
        return {"events": {name: self._seen(run) for name, run in answers.items()}, "flushed": receipt["ok"]}

    def restart(self, job: dict[str, Any]) -> dict[str, Any]:
        from mlxnb.chat import Chat

        chat = Chat.from_json(self.model, Path(job["file"]).read_text())
        return {"events": {"restart": self._seen(chat.send(question(job, 92), max_tokens=ANSWER, temp=0.0))}}

    def rerun(self, job: dict[str, Any]) -> dict[str, Any]:
        """W6: a run of `tokens`, asked again and branched at 90 % of it, and both with nothing kept."""
        prompt, half = text_of(job["tokens"] - 200, job["seed"]), {"temp": 0.0, "template": False}
        found: dict[str, Any] = {}
        for cached in (True, False):
            first = self.model.generate(prompt, max_tokens=200, seed=1, **half)
            assert not isinstance(first, list)
            at = max(0, int((first.usage["prompt_tokens"] + len(first.tokens)) * 0.9) - first.usage["prompt_tokens"])
            ways = {
                "re-run": lambda: self._seen(self.model.generate(prompt, max_tokens=2, **half)),
                "branch": lambda first=first, at=at: self._seen(first.branch(at, first.tokens[at].id + 1), at + 1),
            }
            for name, ask in ways.items():
                if not cached:
                    self._mlxnb.cache_clear()
                found[f"{name} {'warm' if cached else 'cold'}"] = ask()
        return {"events": found}

    def long(self, job: dict[str, Any]) -> dict[str, Any]:
        """W7: one long prompt, on disk at the end."""
        prompt = text_of(job["tokens"], job["seed"])
        seen = self._seen(self.model.generate(prompt, max_tokens=2, template=False, temp=0.0))
        return {"events": {"long": seen}, "flushed": self._mlxnb.cache_flush()["ok"]}


class MlxLm:
    """mlx-lm on the same weights and prompts: the template's plain text encoded anew each turn."""

    def __init__(self) -> None:
        from mlxnb_engine import blas, loader
        from mlxnb_engine.config import resolve

        blas.preload("auto")
        config = resolve()
        self.loaded = loader.load(loader.locate(None, config, lambda *_: None, lambda: False), config, None)
        self.run([1, 2, 3], None, 2)

    def ids(self, messages: list[tuple[str, str]]) -> list[int]:
        from mlxnb_engine.prompt import PromptPreparer
        from mlxnb_engine.types import CompletionRequest, Message, RequestId

        request = CompletionRequest(RequestId("x"), "", messages=tuple(Message(role, text) for role, text in messages))
        return list(PromptPreparer(self.loaded.tokenizer, self.loaded.template).prepare(request).ids)

    def run(self, ids: list[int], cache: Any, tokens: int) -> tuple[float, list[int], Any]:
        """Seconds to the first token (looking the cache up included), the answer, and the state after it."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step
        from mlx_lm.models.cache import make_prompt_cache

        began = time.perf_counter()
        state, rest = cache.fetch_nearest_cache("m", ids) if cache is not None else (None, ids)
        state = state if state is not None else make_prompt_cache(self.loaded.model)
        self.reused = len(ids) - len(rest)
        first, answer = 0.0, []
        for token, _ in generate_step(mx.array(rest), self.loaded.model, max_tokens=tokens, prompt_cache=state):
            first = first or time.perf_counter() - began
            if int(token) in self.loaded.tokenizer.eos_ids:
                break
            answer.append(int(token))
        return first, answer, state

    def ask(self, messages: list[tuple[str, str]], cache: Any, tokens: int = ANSWER) -> tuple[dict[str, Any], str]:
        ids = self.ids(messages)
        seconds, answer, state = self.run(ids, cache, tokens)
        seen = {"seconds": seconds, "prompt": len(ids), "reused": self.reused}
        if cache is not None:
            cache.insert_cache("m", (ids + answer)[: state[0].offset], state)
        return seen, self.loaded.tokenizer.decode(answer)

    def chat(self, job: dict[str, Any]) -> dict[str, Any]:
        from mlx_lm.models.cache import LRUPromptCache

        cache = LRUPromptCache()
        history: list[tuple[str, str]] = [("system", text_of(SYSTEM, job["seed"]))]
        cached: dict[str, Any] = {}
        bare: dict[str, Any] = {}

        def event(name: str, messages: list[tuple[str, str]], memory: Any) -> None:
            cached[name], _ = self.ask(messages, memory)
            bare[name], _ = self.ask(messages, None, 1)

        for i in range(job["turns"]):
            history.append(("user", question(job, i)))
            cached["turn"], answer = self.ask(history, cache)
            if i == job["turns"] - 1:
                bare["turn"], _ = self.ask(history, None, 1)
            history.append(("assistant", answer))
        event("re-run", history[:-1], cache)
        event("fork", [*history[:17], ("user", question(job, 90))], cache)
        event("edit", [*history[:9], ("user", question(job, 91))], cache)
        event("restart", [*history, ("user", question(job, 92))], LRUPromptCache())
        return {"events": cached, "bare": bare}


def question(job: dict[str, Any], number: int) -> str:
    return text_of(job["words"], job["seed"] * 1000 + number)


def serve(side: str) -> None:
    """Answer jobs on standard input, one JSON line each."""
    here: Any = Ours() if side == "ours" else MlxLm()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = getattr(here, job["do"])(job)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


# -- the measurement -----------------------------------------------------------------------------------------------------------


class Side:
    """A process of one side."""

    def __init__(self, side: str, folder: str) -> None:
        env = os.environ | {"MLXNB_PREFIX_DISK_DIR": folder, "MLXNB_PREFIX_DISK_BYTES": "8GiB", "MLXNB_CONTEXT_LIMIT": "8192"}
        command = [sys.executable, __file__, "--serve", side]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._read()

    def ask(self, do: str, **job: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **job}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"the process ended with code {self._process.wait()}"}
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def one_chat(folder: str, seed: int, turns: int, words: int, ours_first: bool) -> dict[str, Any]:
    """W4 of one round: {"ours", "mlx-lm", "none"} -> event -> what was seen."""
    job = {"seed": seed, "turns": turns, "words": words, "file": str(Path(folder) / "chat.json")}

    def ours() -> dict[str, Any]:
        side = Side("ours", folder)
        answer = side.ask("chat", **job)
        side.close()
        after = Side("ours", folder)
        events = {**answer.get("events", {}), **after.ask("restart", **job).get("events", {})}
        after.close()
        return {"ours": events, **({"error": answer["error"]} if "error" in answer else {}), "flushed": answer.get("flushed")}

    def theirs() -> dict[str, Any]:
        side = Side("mlx-lm", folder)
        answer = side.ask("chat", **job)
        side.close()
        failed = {"error": answer["error"]} if "error" in answer else {}
        return {"mlx-lm": answer.get("events", {}), "none": answer.get("bare", {}), **failed}

    first, second = (ours, theirs) if ours_first else (theirs, ours)
    return {**first(), **second()}


def reuse_of(folder: str, seed: int, tokens: int) -> dict[str, Any]:
    """W6 and W7 of one round."""
    side = Side("ours", folder)
    again = side.ask("rerun", seed=seed, tokens=tokens // 2)
    cold = side.ask("long", seed=seed + 7, tokens=tokens)
    side.close()
    after = Side("ours", folder)
    warm = after.ask("long", seed=seed + 7, tokens=tokens)
    after.close()
    return {"W6": again, "W7": {"cold": cold, "warm": warm}}


def ratio(rounds: list[dict[str, Any]], slow: tuple[str, ...], fast: tuple[str, ...]) -> str:
    """Median (min to max) of the rounds' own ratios of time to first token."""

    def at(record: dict[str, Any], path: tuple[str, ...]) -> float:
        for key in path:
            record = record[key]
        return float(record["seconds"])

    found = []
    for one in rounds:
        try:
            found.append(at(one, slow) / at(one, fast))
        except KeyError:
            continue  # a failed arm; its error is in the JSON
    return f"**{statistics.median(found):.2f}x** ({min(found):.2f} to {max(found):.2f})" if found else "no round succeeded"


def table(result: dict[str, Any]) -> str:
    chats, again = result["chats"], result["again"]
    bare, own = (f"{AIMS[side]:.0f}x" for side in ("none", "mlx-lm"))
    head = ("W4: first token", f"against mlx-lm without a cache ({bare} at the turn)", f"against its own cache ({own})")
    lines = [f"| {' | '.join(head)} | reused by mlxnb | reused by mlx-lm |", "|---|---|---|---|---|"]
    for event in EVENTS:
        shares = []
        for side in ("ours", "mlx-lm"):
            seen = [one[side][event] for one in chats if event in one.get(side, {})]
            shares.append(f"{sum(s['reused'] for s in seen):,} of {sum(s['prompt'] for s in seen):,}" if seen else "-")
        lines.append(
            f"| {event} | {ratio(chats, ('none', event), ('ours', event))} | {ratio(chats, ('mlx-lm', event), ('ours', event))} "
            f"| {shares[0]} | {shares[1]} |"
        )
    lines += ["", "| reuse of one run | against reading the same ids | aim |", "|---|---|---|"]
    for way in ("re-run", "branch"):
        found = ratio(again, ("W6", "events", f"{way} cold"), ("W6", "events", f"{way} warm"))
        lines.append(f"| W6: {way} | {found} | {AIMS['W6']:.0f}x |")
    disk = ratio(again, ("W7", "cold", "events", "long"), ("W7", "warm", "events", "long"))
    lines.append(f"| W7: 4k tokens from disk, new process | {disk} | {AIMS['W7']:.0f}x |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--words", type=int, default=170, help="of a question")
    parser.add_argument("--tokens", type=int, default=4000, help="of W7; W6 has half")
    parser.add_argument("--only", choices=("W4", "W6"))
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    parser.add_argument("--serve", choices=("ours", "mlx-lm"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    result: dict[str, Any] = {"facts": facts("mlx", "mlx-lm", "mlxnb"), "chats": [], "again": []}
    options.out.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        (options.out / "reuse.json").write_text(json.dumps(result, indent=1))
        (options.out / "reuse.md").write_text(table(result))

    for index in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:  # a fresh disk tier for each arm and round
            if options.only != "W6":
                result["chats"].append(one_chat(folder, index + 1, options.turns, options.words, index % 2 == 0))
                save()
        with tempfile.TemporaryDirectory() as folder:
            if options.only != "W4":
                result["again"].append(reuse_of(folder, index + 100, options.tokens))
                save()
        print(f"round {index + 1} of {options.rounds}\n{table(result)}", flush=True)


if __name__ == "__main__":
    main()
