// What a strict eye sees in an output, as lists of faults. Runs in the page; `node` is the output area.
(() => {
  const looks = {};
  const area = (box) => Math.max(0, box.right - box.left) * Math.max(0, box.bottom - box.top);
  const short = (text) => text.trim().replace(/\s+/g, " ").slice(0, 40);
  const ours = (node) => node.querySelectorAll(".mlxnb, .mlxnb *");

  // -- colours: anything that CSS can say becomes red, green, blue and alpha by drawing it
  const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const seen = new Map();
  const rgba = (colour) => {
    if (!seen.has(colour)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = colour;
      pen.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
      seen.set(colour, [r, g, b, a / 255]);
    }
    return seen.get(colour);
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((part, i) => part * a + under[i] * (1 - a));
  const brightness = (rgb) => {
    const [r, g, b] = rgb.map((part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
  };

  /** Texts with less than 4.5:1 on what is behind them, with the ratio. */
  looks.faint = (node) => {
    const found = new Set();
    const walk = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const text = walk.currentNode, element = text.parentElement;
      if (!text.data.trim() || !element.closest(".mlxnb") || element.closest(".mlxnb-sr, [aria-hidden=true], option")) continue;
      const range = document.createRange();
      range.selectNodeContents(text);
      if (![...range.getClientRects()].some((box) => box.width > 1 && box.height > 1)) continue;
      const behind = ground(element);
      const [one, two] = [brightness(over(rgba(getComputedStyle(element).color), behind)), brightness(behind)];
      const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
      if (ratio < 4.5) found.add(`${ratio.toFixed(2)} ${element.className || element.nodeName}: ${short(text.data)}`);
    }
    return [...found];
  };

  /** In the dark theme: areas that glare, as what was drawn for the light one. */
  looks.glaring = (node) => {
    const found = [];
    for (const element of ours(node)) {
      const [r, g, b, a] = rgba(getComputedStyle(element).backgroundColor);
      const box = element.getBoundingClientRect();
      if (a > 0.5 && area(box) > 4000 && brightness([r, g, b]) > 0.35) found.push(`${element.className}: ${getComputedStyle(element).backgroundColor}`);
    }
    return found;
  };

  /** Whether the view has the surface and the ink of JupyterLab's theme, not colours of its own. */
  looks.foreign = (node) => {
    const probe = document.body.appendChild(document.createElement("i"));
    const value = (name) => {
      probe.style.color = `var(${name})`;
      return String(rgba(getComputedStyle(probe).color));
    };
    const [surface, ink] = [value("--jp-layout-color0"), value("--jp-ui-font-color1")];
    probe.remove();
    const found = [];
    for (const view of node.querySelectorAll(".mlxnb")) {
      const style = getComputedStyle(view);
      if (String(rgba(style.backgroundColor)) !== surface) found.push(`surface ${style.backgroundColor}`);
      if (String(rgba(style.color)) !== ink) found.push(`ink ${style.color}`);
    }
    return found;
  };

  // -- room
  const scrolls = (element, end) => {
    for (let e = element.parentElement; e && e !== end; e = e.parentElement) if (getComputedStyle(e).overflowX !== "visible") return true;
    return false;
  };

  /** Parts that stick out to the right of the output and cannot be scrolled to. */
  looks.overflowing = (node) => {
    const edge = node.getBoundingClientRect().right + 1, found = [];
    for (const element of node.querySelectorAll("*")) {
      const box = element.getBoundingClientRect();
      if (box.width > 0 && box.right > edge && !scrolls(element, node.parentElement)) found.push(`${element.className}: ${short(element.textContent)}`);
    }
    // JupyterLab lets an output scroll; a view of ours never needs it, its own wide parts scroll by themselves.
    for (const element of [node, ...node.querySelectorAll("*")]) {
      if (!element.closest(".mlxnb") && element.querySelector(".mlxnb") && element.scrollWidth > element.clientWidth + 1) {
        found.push(`${element.className} scrolls sideways: ${element.scrollWidth} in ${element.clientWidth}`);
      }
    }
    return found;
  };

  /** Texts that are cut off where nothing can scroll and no tooltip has the whole of them. */
  looks.clipped = (node) => {
    const found = [];
    for (const element of ours(node)) {
      if (element.closest(".mlxnb-sr, [aria-hidden=true], .mlxnb-formula, .mlxnb-math-open, svg, math") || !element.textContent.trim()) continue;
      const style = getComputedStyle(element);
      const wide = /hidden|clip/.test(style.overflowX) && element.scrollWidth > element.clientWidth + 1;
      const high = /hidden|clip/.test(style.overflowY) && element.scrollHeight > element.clientHeight + 2;
      if (!(wide || high) || style.display.startsWith("inline") && style.display === "inline") continue;
      const whole = element.closest("[title]")?.title ?? "";
      const missing = element.textContent.trim();
      if (whole.replace(/\s+/g, "").includes(missing.replace(/\s+/g, ""))) continue;
      found.push(`${wide ? "cut at the side" : "cut below"} ${element.className}: ${short(missing)}`);
    }
    // A formula's box counts room that no glyph fills, so its parts are measured.
    for (const formula of node.querySelectorAll(".mlxnb-formula")) {
      const box = formula.getBoundingClientRect();
      for (const part of formula.querySelectorAll("mi, mn, mo, mtext")) {
        const own = part.getBoundingClientRect();
        if (own.top < box.top - 6 || own.bottom > box.bottom + 6) found.push(`a formula is cut: ${short(formula.textContent)}`);
      }
    }
    return found;
  };

  /** Pairs of texts that are drawn over one another. */
  looks.collisions = (node) => {
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
      if (wide > 2 && high > 6) found.push(`${one.slice(0, 20)} | ${other.slice(0, 20)}`);
    }
    return found;
  };

  /** What can be pressed and is too small to hit. Links stand in lines of text. */
  looks.small = (node) => {
    const found = [];
    for (const element of node.querySelectorAll(".mlxnb :is(button, select, input, summary)")) {
      const box = element.getBoundingClientRect();
      if (box.width === 0 || element.closest(".mlxnb-sr, .mlxnb-seg") || element.matches("[type=range]")) continue;
      if (box.height < 23.5) found.push(`${box.width.toFixed(0)}x${box.height.toFixed(0)} ${element.className}: ${short(element.textContent || element.ariaLabel || "")}`);
    }
    return found;
  };

  /** All of them, as [what, list]; only what was found. */
  looks.faults = (node, dark) => {
    const names = ["overflowing", "clipped", "collisions", "faint", "foreign", "small", ...(dark ? ["glaring"] : [])];
    return names.map((name) => [name, looks[name](node)]).filter(([, list]) => list.length > 0);
  };
  window.__looks = looks;
})();
