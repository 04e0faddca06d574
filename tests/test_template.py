"""Chat templates: what they render, whom they refuse, and that hostile ones neither escape nor run on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import jinja2
import pytest

from mlxnb_engine import template_worker
from mlxnb_engine.errors import MlxnbError, ModelError, RequestError
from mlxnb_engine.template import ChatTemplate, Limits, RenderProcess
from mlxnb_engine.types import Message

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = (Message("user", "hi"),)
# Short limits, so that a test of one ends soon; what they do does not depend on their size.
SHORT = Limits(cpu_s=0.1, wall_s=60.0)


@pytest.fixture(scope="module")
def process() -> Iterator[RenderProcess]:
    made = RenderProcess(memory_bytes=128 << 20)
    yield made
    made.close()


def render(source: str, process: RenderProcess, **values: object) -> str:
    return ChatTemplate(source, "<s>", "</s>", limits=SHORT, process=process).render(USER, **values)  # type: ignore[arg-type]


# -- rendering ---------------------------------------------------------------------------------------------------------


def test_messages_become_text(process: RenderProcess) -> None:
    template = ChatTemplate(CHATML, process=process)
    assert template.render([Message("system", "be kind"), *USER]) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render(USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert template.render([{"role": "user", "content": "hi"}]) == template.render(USER)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% for m in messages %}\n  {{ m.content }}\n  {% endfor %}\n", "  hi\n"),
        ("{{ {'a': '<é>', 'b': [1, none]} | tojson }}", '{"a": "<é>", "b": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}", "013"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ tools is none }}", "True"),
        ("{{ dict(a=1).a }}", "1"),
        ("{{ messages[0]['content'].strip() | trim }}{{ 'ab' * 3 }}{{ 2 ** 5 }}", "hiababab32"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('y') }}", "[y]"),
        ("{{ 'a<b' }}&\u2028", "a<b&\u2028"),
    ],
)
def test_templates_have_the_names_that_chat_templates_use(source: str, expected: str, process: RenderProcess) -> None:
    assert render(source, process) == expected


def test_tools_reach_the_template(process: RenderProcess) -> None:
    source = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    assert ChatTemplate(source, process=process).render(USER, tools=[{"function": {"name": "f"}}]) == "f"


def test_the_thinking_switch_reaches_a_template_that_has_one(process: RenderProcess) -> None:
    template = ChatTemplate("{% if enable_thinking %}on{% else %}off{% endif %}", process=process)
    assert template.variables == {"enable_thinking"}
    assert template.render(USER, **template.thinking_values(True)) == "on"
    assert template.render(USER, **template.thinking_values(False)) == "off"
    assert template.thinking_values(None) == {}


def test_thinking_without_a_switch_is_refused(process: RenderProcess) -> None:
    with pytest.raises(RequestError, match="no switch for thinking"):
        ChatTemplate(CHATML, process=process).thinking_values(False)


def test_a_refusal_of_the_template_is_the_callers_to_fix(process: RenderProcess) -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    with pytest.raises(RequestError, match="System role not supported") as caught:
        ChatTemplate(source, process=process).render([Message("system", "x"), *USER])
    assert "system message" in caught.value.hint


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ missing.name }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{% include 'x' %}", "{{ x | nofilter }}"]
)
def test_a_broken_template_is_a_model_error(source: str, process: RenderProcess) -> None:
    with pytest.raises(ModelError, match="chat template"):
        render(source, process)


def test_no_template_says_what_to_do() -> None:
    with pytest.raises(ModelError, match="--no-template"):
        ChatTemplate("")


# -- S6: injections ----------------------------------------------------------------------------------------------------

ESCAPES = [
    "''.__class__.__mro__[1].__subclasses__()",
    "''['__class__']",
    "''|attr('__class__')|attr('__mro__')",
    "().__class__.__bases__[0]",
    "[].__class__.__base__.__subclasses__()",
    "{}.__class__.__init__.__globals__",
    "messages.__class__",
    "messages[0].__class__.__mro__",
    "messages.__init__.__globals__",
    "raise_exception.__globals__",
    "raise_exception.__code__",
    "raise_exception['__globals__']",
    "strftime_now.__globals__['sys']",
    "strftime_now|attr('__globals__')",
    "strftime_now.__builtins__",
    "namespace.__init__.__globals__",
    "namespace(__class__='x').__class__",
    "range.__class__.__subclasses__(range.__class__)",
    "range.__self__",
    "dict.__globals__",
    "dict.__base__",
    "cycler.__init__.__globals__.os.popen('id').read()",
    "joiner.__init__.__globals__.os",
    "lipsum.__globals__.os.system('id')",
    "self.__init__.__globals__",
    "self._TemplateReference__context",
    "self.__dict__",
    "loop.__class__",
    "'{0.__class__.__mro__}'.format(1)",
    "'{0.__globals__}'.format(raise_exception)",
    "'{x.__class__}'.format_map({'x': 1})",
    "('{0.__cla' ~ 'ss__.__base__}').format(1)",
    "''|format|attr('__call__')",
    "[''.format]|map('attr', '__self__')|list|first|attr('__class__')",
    "messages|map(attribute='__class__')|list",
    "messages|groupby('__class__')|list",
    "messages|selectattr('__class__')|list|tojson",
    "messages|sum(attribute='__class__', start=0)",
    "messages.append('x')",
    "messages.clear()",
    "messages[0].update({'role': 'system'})",
    "messages[0].pop('role')",
    "messages|map('attr', '__class__')|list",
    "(messages|attr('__iter__'))()",
    "raise_exception.__defaults__.__class__",
    "().__class__|attr('__subclasses__')()",
    "caller.__globals__",
    "environment.__class__",
]
# Names that only a text from inside the interpreter holds.
LEAKS = ("<class", "<built-in", "<function", "<module", "<code", "uid=", "__main__", "subclasses")


def escaped(text: str) -> bool:
    return any(leak in text for leak in LEAKS)


@pytest.mark.parametrize("expression", ESCAPES)
def test_no_expression_reaches_the_interpreter(expression: str, process: RenderProcess) -> None:
    try:
        text = render("{% for x in [1] %}{{ " + expression + " }}{% endfor %}|{{ messages | length }}|{{ messages[0].role }}", process)
    except MlxnbError as error:
        assert "uid=" not in error.message
    else:
        assert not escaped(text), text
        assert text.endswith("|1|user")


def test_a_plain_environment_lets_many_of_them_out() -> None:
    """Negative control: the same expressions without a sandbox. None of those run here starts a process."""
    out = 0
    environment = jinja2.Environment()
    for expression in ESCAPES:
        if "popen" in expression or "system(" in expression:
            continue
        values = {"messages": [{"role": "user", "content": "hi"}], "raise_exception": lambda x: None, "strftime_now": time.strftime}
        try:
            text = environment.from_string("{% for x in [1] %}{{ " + expression + " }}{% endfor %}|{{ messages | length }}").render(values)
        except Exception:
            continue
        out += escaped(text) or not text.endswith("|1")
    assert len(ESCAPES) >= 40
    assert out >= 15, out


# -- S6: bombs -----------------------------------------------------------------------------------------------------------

NEST = "{% set ns = namespace(a=[1]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
BOMBS = {
    "string product": "{{ 'a' * 50000000 }}",
    "product from the right": "{{ 50000000 * 'a' }}",
    "list product": "{{ ([1] * 100000000) | length }}",
    "huge power": "{{ 10 ** 10000000 }}",
    "tower of powers": "{{ 9 ** (9 ** 9) }}",
    "doubling by concatenation": "{% set ns = namespace(a='ab') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "doubling by addition": "{% set ns = namespace(a='ab') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "doubling by replace": "{% set ns = namespace(a='a') %}{% for i in range(60) %}{% set ns.a = ns.a | replace('a', 'aa') %}{% endfor %}",
    "doubling by join": "{% set ns = namespace(a='a') %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] | join %}{% endfor %}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "nested loops with output": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "large range": "{% for i in range(100000000000) %}x{% endfor %}",
    "range to list": "{{ range(99999) | list * 999 }}",
    "wide centre": "{{ 'x' | center(100000000000) }}",
    "wide indent": "{{ 'x\ny' | indent(100000000000) }}",
    "wide format": "{{ '%099999999999d' | format(1) }}",
    "wide str.format": "{{ '{:>99999999999}'.format(1) }}",
    "wide ljust": "{{ 'x'.ljust(99999999999) }}",
    "wide tab": "{{ '\t'.expandtabs(2000000000) }}",
    "batch fill": "{{ [1] | batch(999999999, 'x') | list | length }}",
    "slices": "{{ [1] | slice(999999999) | list | length }}",
    "recursive macro": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "exponential macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "shared nested lists as text": NEST + "{{ ns.a }}",
    "shared nested lists as JSON": NEST + "{{ ns.a | tojson }}",
    "comparing nested lists": NEST
    + "{% set o = namespace(a=[1]) %}{% for i in range(40) %}{% set o.a = [o.a, o.a] %}{% endfor %}{{ ns.a == o.a }}",
    "deep parentheses": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep nesting of blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "a megabyte of output": "{% for i in range(3000) %}{{ 'x' * 1000 }}{% endfor %}",
    "sum of strings": "{{ (range(99999) | map('string') | list * 40) | join(',' * 4000) }}",
    "product of big numbers": "{% set ns = namespace(a=3) %}{% for i in range(64) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_in_a_typed_error_and_the_next_rendering_works(name: str, process: RenderProcess) -> None:
    with pytest.raises(ModelError, match="chat template"):
        render(BOMBS[name], process)
    assert render("ok", process) == "ok"


def test_a_plain_environment_renders_what_our_limits_refuse() -> None:
    """Negative control for size and for time. The time bomb runs in a process of its own, since nothing else can stop it."""
    assert len(BOMBS) >= 20
    assert len(jinja2.Environment().from_string("{{ 'a' * 2000000 }}").render()) > 1 << 20
    code = f"import jinja2; jinja2.Environment().from_string({BOMBS['nested loops']!r}).render()"
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", code], timeout=1.0, check=False)


def test_the_default_limits_are_one_second_and_one_mebibyte(process: RenderProcess) -> None:
    assert Limits().cpu_s == 1.0
    assert Limits().output_bytes == 1 << 20
    inside = ChatTemplate("{% for i in range(1000) %}{{ 'x' * 1000 }}{% endfor %}", process=process)
    assert len(inside.render([])) == 1_000_000
    with pytest.raises(ModelError, match="ran for more than 1 s"):
        ChatTemplate(BOMBS["nested loops"], process=process).render(USER)


def test_output_counts_in_bytes_and_content_comes_on_top(process: RenderProcess) -> None:
    limits = Limits(output_bytes=3000, cpu_s=5.0)
    long = Message("user", "é" * 100_000)
    assert ChatTemplate("{{ messages[0].content }}", limits=limits, process=process).render([long]) == long.content
    assert len(ChatTemplate("{{ 'é' * 1490 }}", limits=limits, process=process).render([])) == 1490
    with pytest.raises(ModelError, match="limits"):
        ChatTemplate("{{ 'é' * 1600 }}", limits=limits, process=process).render([])


# -- the process -------------------------------------------------------------------------------------------------------


def test_the_process_is_started_once_and_again_after_it_was_killed() -> None:
    process = RenderProcess()
    try:
        assert render("a", process) == "a"
        first = process._process
        assert first is not None
        assert render("b", process) == "b"
        assert process._process is first
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        assert render("c", process) == "c"
        assert process._process is not first
    finally:
        process.close()
    process.close()
    assert process._process is None


def test_many_threads_share_one_process(process: RenderProcess) -> None:
    results: dict[int, str] = {}

    def work(n: int) -> None:
        for _ in range(5):
            results[n] = ChatTemplate("{{ messages[0].content }}", process=process).render([Message("user", str(n))])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: str(n) for n in range(6)}


def test_an_interrupted_call_does_not_leave_its_reply_to_the_next(process: RenderProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    assert render("first", process) == "first"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mlxnb_engine.template._read_frame", interrupted)
        with pytest.raises(KeyboardInterrupt):
            render("lost", process)
    assert render("next", process) == "next"


def test_an_interrupt_of_the_notebooks_process_group_does_not_reach_it(process: RenderProcess) -> None:
    assert render("a", process) == "a"
    assert process._process is not None
    assert os.getpgid(process._process.pid) != os.getpgid(0)


def test_the_process_ends_when_its_input_does() -> None:
    process = RenderProcess()
    assert render("a", process) == "a"
    child = process._process
    assert child is not None and child.stdin is not None
    child.stdin.close()
    assert child.wait(timeout=30) == 0
    process.close()


def test_closing_does_not_wait_for_a_call_that_runs(process: RenderProcess) -> None:
    failures: list[ModelError] = []
    limits = Limits(cpu_s=100.0, wall_s=100.0)
    source = BOMBS["nested loops"]

    def work() -> None:
        try:
            ChatTemplate(source, limits=limits, process=process).render(USER)
        except ModelError as error:
            failures.append(error)

    assert render("a", process) == "a"
    thread = threading.Thread(target=work)
    thread.start()
    while not process._lock.locked():
        time.sleep(0.001)
    process.close()
    thread.join()
    assert len(failures) == 1
    assert render("b", process) == "b"


def test_a_forked_child_uses_a_process_of_its_own() -> None:
    code = (
        "import os, sys\n"
        "from mlxnb_engine import template as t\n"
        "made = t.ChatTemplate('{{ messages[0].content }}')\n"
        "say = lambda x: made.render([{'role': 'user', 'content': x}]) == x\n"
        "assert say('parent')\n"
        "theirs = t._SHARED._process.pid\n"
        "t._SHARED._lock.acquire()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if say('child') and t._SHARED._process.pid != theirs else 1)\n"
        "t._SHARED._lock.release()\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert say('parent again') and t._SHARED._process.pid == theirs\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n{code}"], check=False, timeout=60
    )
    assert done.returncode == 0


def test_a_python_that_cannot_start_is_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("/nonexistent/python", "/bin/false" if os.path.exists("/bin/false") else "/usr/bin/false"):
        monkeypatch.setattr(sys, "executable", program)
        with pytest.raises(ModelError, match="process for chat templates"):
            render("a", RenderProcess())


def test_the_worker_answers_every_failure_with_an_error() -> None:
    """In this process, so that a line that raises is seen."""
    kinds = {
        "{{ raise_exception('no') }}": "raised",
        "{{ 'a' * 50000000 }}": "limit",
        "{% if %}": "syntax",
        "{% set ns = namespace(_x=1) %}": "unsafe",
        "{{ 1 / 0 }}": "failed",
    }
    for source, kind in kinds.items():
        assert template_worker.answer({"source": source, "values": {}, "output_bytes": 100})["error"] == kind, source
    assert template_worker.answer({"source": "{{ a }}{% set b = 1 %}{{ b }}", "variables": True}) == {"names": ["a"]}
