"""A picture of each view in both themes and two widths, from a real notebook, kept in test-output/. Each must fit its output."""

from __future__ import annotations

import json

import pytest

from .lab import SIZE, Lab, Notebook
from .server import ROOT

GALLERY = ROOT / "tests" / "browser" / "answers.json"
SIZES = {900: {"width": 900, "height": 2400}, 1400: {"width": 1400, "height": 2400}}
SETUP = "import scripted; scripted.use(scripted.gallery)"
NAMES = tuple(json.loads(GALLERY.read_text("utf-8")))


def overflowing(lab: Lab, notebook: Notebook, cell: int) -> list[str]:
    """Parts of an output that stick out to the right of it and cannot be scrolled to."""
    script = """
    (node) => {
      const edge = node.getBoundingClientRect().right + 1, found = [];
      const scrolls = (e) => {
        for (let p = e.parentElement; p && p !== node.parentElement; p = p.parentElement) {
          if (getComputedStyle(p).overflowX !== "visible") return true;
        }
        return false;
      };
      for (const e of node.querySelectorAll("*")) {
        const box = e.getBoundingClientRect();
        if (box.width > 0 && box.right > edge && !scrolls(e)) found.push(e.className + ": " + e.textContent.slice(0, 40));
      }
      return found;
    }"""
    found: list[str] = lab.page.evaluate(script, notebook.output(cell))
    return found


def collisions(lab: Lab, notebook: Notebook, cell: int) -> list[str]:
    """Pairs of texts that are drawn over one another."""
    script = """
    (node) => {
      const texts = [], walk = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
      while (walk.nextNode()) {
        const text = walk.currentNode, parent = text.parentElement;
        if (!text.data.trim() || parent.closest(".mlxnb-sr, [aria-hidden=true], pre, svg, math, mjx-container")) continue;
        const range = document.createRange();
        range.selectNodeContents(text);
        for (const whole of range.getClientRects()) {
          const box = { left: whole.left, right: whole.right, top: whole.top, bottom: whole.bottom };
          for (let p = parent; p && p !== node.parentElement; p = p.parentElement) {
            if (getComputedStyle(p).overflowX === "visible") continue;
            const clip = p.getBoundingClientRect();
            box.left = Math.max(box.left, clip.left);
            box.right = Math.min(box.right, clip.right);
            box.top = Math.max(box.top, clip.top);
            box.bottom = Math.min(box.bottom, clip.bottom);
          }
          if (box.right - box.left > 1 && box.bottom - box.top > 1) texts.push([box, text.data.trim(), text]);
        }
      }
      const found = [];
      for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < Math.min(texts.length, i + 40); j++) {
        const [a, one, first] = texts[i], [b, other, second] = texts[j];
        if (first === second) continue;
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 2 && high > 6) found.push(one.slice(0, 20) + " | " + other.slice(0, 20));
      }
      return found;
    }"""
    found: list[str] = lab.page.evaluate(script, notebook.output(cell))
    return found


@pytest.mark.parametrize("options", ["", "--view tokens --logprobs 4", "-n 3"], ids=["answer", "tokens", "compare"])
def test_every_kind_of_answer_fits_its_output_in_both_themes_and_widths(lab: Lab, options: str) -> None:
    kind = {"": "answer", "-n 3": "compare"}.get(options, "tokens")
    notebook = lab.new([f"%%mlx {options}\n{name}" for name in NAMES], setup=SETUP, name=kind)
    notebook.run_all()
    for cell in range(len(NAMES)):
        notebook.wait_end(cell)
    try:
        for dark in (False, True):
            lab.theme(dark)
            for width, size in SIZES.items():
                lab.page.set_viewport_size(size)
                for cell, name in enumerate(NAMES):
                    node = notebook.output(cell)
                    node.scroll_into_view_if_needed()
                    assert overflowing(lab, notebook, cell) == [], (name, width)
                    assert collisions(lab, notebook, cell) == [], (name, width)
                    lab.shot(f"{kind}-{name}-{width}-{'dark' if dark else 'light'}", node)
    finally:
        lab.theme(False)
        lab.page.set_viewport_size(SIZE)
