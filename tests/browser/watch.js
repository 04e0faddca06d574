// Runs in every frame before anything else: traps for what injected markup would do, and the measuring tools of the tests.
(() => {
  if (window.__watch) return;
  const ran = [];
  const trap = (name) => (...args) => { ran.push(`${name}(${args.join(", ").slice(0, 80)}) in ${location.href}`); };
  for (const name of ["alert", "confirm", "prompt", "print", "msgbox", "__injected"]) {
    Object.defineProperty(window, name, { value: trap(name), writable: false, configurable: false });
  }
  const watch = { ran, frames: null };
  watch.forget = () => { ran.length = 0; };
  Object.defineProperty(window, "__watch", { value: watch, writable: false, configurable: false });

  // Everything an inline handler could wait for, sent to every element; the default action (a click that leaves) never runs.
  const EVENTS = ["pointerenter", "pointerover", "mouseover", "mouseenter", "mousemove", "pointerdown", "mousedown", "mouseup", "click",
    "auxclick", "dblclick", "contextmenu", "focus", "focusin", "blur", "input", "change", "keydown", "keyup", "submit", "toggle", "load",
    "error", "start", "animationstart", "animationend", "transitionend", "begin", "end", "scroll", "wheel", "beforetoggle", "canplay"];
  // `ours` too: also to elements without an inline handler, whose listeners are our own; what they do is then part of the test.
  watch.provoke = (root, ours = false) => {
    const stop = (event) => event.preventDefault();
    for (const name of EVENTS) root.addEventListener(name, stop, true);
    let count = 0;
    for (const element of [...root.querySelectorAll("*")]) {
      if (!ours && ![...element.attributes].some(({ name }) => /^on/i.test(name))) continue;
      for (const name of EVENTS) {
        // Not bubbling: only the handlers on the element itself, which is where injected ones are.
        element.dispatchEvent(new Event(name, { bubbles: false, cancelable: true }));
        count += 1;
      }
    }
    for (const name of EVENTS) root.removeEventListener(name, stop, true);
    return count;
  };

  // What must not be in an output, whoever put it there: [what, markup] pairs.
  const FETCHING = "script,iframe,frame,object,embed,link,style,base,meta,form,input:not([type=range]):not([type=checkbox]),video,audio,source,track,portal,template,dialog";
  watch.suspects = (root, ownControls) => {
    const found = [];
    const say = (why, element) => found.push(`${why}: ${element.outerHTML.slice(0, 160)}`);
    for (const element of root.querySelectorAll("*")) {
      if (element.closest(ownControls || "mlxnb-none")) continue;
      if (element.matches(FETCHING)) say("element", element);
      if (element.matches("img")) say("image", element);
      for (const { name, value } of element.attributes) {
        if (/^on/i.test(name)) say("handler", element);
        if (/^data-commandlinker/i.test(name)) say("command", element);
        if (/^(href|src|action|formaction|xlink:href|srcset|poster|background|ping|data)$/i.test(name)) {
          const plain = value.replace(/[\u0000-\u0020\u007f-\u00a0]/g, "");
          if (/^[a-z][a-z0-9+.-]*:/i.test(plain) && !/^(https?|mailto):/i.test(plain)) say("address", element);
        }
        if (name === "style" && /url\s*\(|expression|-moz-binding|behavior/i.test(value)) say("style", element);
        if (name === "id" && /^(document|Jupyter|jp-main-dock-panel|x)$/.test(value)) say("id", element);
      }
    }
    return found;
  };

  // Frame times in ms between start and stop, as the compositor gave them to scripts.
  watch.startFrames = () => {
    const frames = { times: [], last: performance.now(), on: true };
    watch.frames = frames;
    const tick = (now) => {
      if (!frames.on) return;
      frames.times.push(now - frames.last);
      frames.last = now;
      requestAnimationFrame(tick);
    };
    requestAnimationFrame((now) => { frames.last = now; requestAnimationFrame(tick); });
  };
  watch.stopFrames = () => {
    const frames = watch.frames;
    watch.frames = null;
    if (!frames) return [];
    frames.on = false;
    return frames.times.map((ms) => Math.round(ms * 10) / 10);
  };

  // ---- JupyterLab ------------------------------------------------------------------------------------------------------
  const nb = {};
  Object.defineProperty(window, "__nb", { value: nb, writable: false, configurable: false });
  const app = () => window.jupyterapp || window.jupyterlab;
  nb.app = app;
  nb.panel = (path) => {
    for (const widget of app().shell.widgets("main")) {
      if (widget.context && widget.context.path === path && widget.content && widget.content.widgets) return widget;
    }
    throw new Error(`no open notebook ${path}`);
  };
  nb.open = async (path, kernel) => {
    if (kernel && !(kernel in (app().serviceManager.kernelspecs.specs || { kernelspecs: {} }).kernelspecs)) {
      await app().serviceManager.kernelspecs.refreshSpecs();
    }
    const wanted = kernel ? { name: kernel } : { shouldStart: false, autoStartDefault: false };
    const options = kernel ? {} : { kernelPreference: { shouldStart: false, autoStartDefault: false, canStart: false } };
    await app().commands.execute("docmanager:open", { path, factory: "Notebook", kernel: kernel ? wanted : undefined, ...options });
    const panel = nb.panel(path);
    await nb.within(panel.context.ready, `file ${path}`);
    await nb.within(panel.revealed, `view ${path}`);
    if (kernel) {
      await nb.within(panel.sessionContext.ready, `session ${path}`);
      const session = panel.sessionContext.session;
      if (!session || !session.kernel) throw new Error(`no kernel for ${path}`);
      nb.count(path, session.kernel);
    }
  };
  // A kernel that never answers must fail the test, not hang it.
  nb.within = (promise, what, ms = 60000) => {
    let timer;
    const late = new Promise((_, reject) => { timer = setTimeout(() => reject(new Error(`${what}: no answer in ${ms} ms`)), ms); });
    return Promise.race([promise, late]).finally(() => clearTimeout(timer));
  };
  const counts = new Map();
  nb.count = (path, kernel) => {
    const log = { at: [], kinds: [], sizes: [] };
    counts.set(path, log);
    kernel.iopubMessage.connect((_, message) => {
      log.at.push(performance.now());
      log.kinds.push(message.header.msg_type);
      log.sizes.push(JSON.stringify(message.content).length);
    });
  };
  nb.messages = (path) => counts.get(path) || { at: [], kinds: [], sizes: [] };
  nb.kernel = (path) => nb.panel(path).sessionContext.session.kernel;
  nb.status = (path) => {
    const session = nb.panel(path).sessionContext.session;
    return session && session.kernel ? session.kernel.status : "none";
  };
  // Run code in the kernel without a cell: [status, name, value, stdout].
  nb.call = async (path, code) => {
    let out = "";
    const future = nb.kernel(path).requestExecute({ code, silent: false, store_history: false, allow_stdin: true, stop_on_error: false });
    future.onIOPub = (message) => {
      if (message.header.msg_type === "stream" && message.content.name === "stdout") out += message.content.text;
    };
    const { content } = await nb.within(future.done, code.slice(0, 80));
    return { status: content.status, error: content.status === "ok" ? "" : `${content.ename}: ${content.evalue}`, out };
  };
  nb.select = (path, index) => {
    const panel = nb.panel(path);
    app().shell.activateById(panel.id);
    panel.content.activeCellIndex = index;
    panel.content.deselectAll();
    return panel;
  };
  // Starts the cell; ends when the execution does unless `wait` is false.
  nb.run = async (path, index, wait) => {
    const panel = nb.select(path, index);
    panel.content.mode = "command";
    const over = app().commands.execute("notebook:run-cell");
    if (wait) await nb.within(over, `cell ${index} of ${path}`);
  };
  nb.cell = (path, index) => nb.panel(path).content.widgets[index];
  nb.outputNode = (path, index) => nb.cell(path, index).outputArea.node;
  nb.outputs = (path, index) => nb.panel(path).content.model.cells.get(index).toJSON().outputs || [];
  // JupyterLab puts a launcher into an empty main area, and it may come in front of a notebook that was opened meanwhile: an
  // element that is not shown has no lines in its text.
  // Whether every answer in the outputs is over, and its saved form in the place of the live view.
  nb.ended = (path, index) => {
    const shown = nb.outputs(path, index).filter(({ output_type }) => output_type === "display_data");
    const over = (run) => ["done", "stopped", "failed"].includes(run.status);
    return shown.length > 0 && shown.every(({ data }) => {
      const record = data["application/vnd.mlxnb.run.v1+json"];
      return record !== undefined && (record.runs || [record]).every(over) && (record.runs || [record]).length > 0;
    });
  };
  nb.text = (path, index) => {
    const panel = nb.panel(path);
    if (!panel.isVisible) app().shell.activateById(panel.id);
    return nb.outputNode(path, index).innerText;
  };
  nb.waiting = (path, index) => {
    const state = nb.panel(path).content.model.cells.get(index).executionState;
    return state !== undefined ? state !== "idle" : nb.cell(path, index).node.querySelector(".jp-InputPrompt").textContent.includes("*");
  };
  nb.count_cells = (path) => nb.panel(path).content.widgets.length;
  nb.save = async (path) => { await nb.panel(path).context.save(); };
  nb.close = async (path, shutdown) => {
    const panel = nb.panel(path);
    if (shutdown && panel.sessionContext.session) await nb.within(panel.sessionContext.shutdown(), "shutdown");
    panel.dispose();
  };
  // `looks`: how often the main area must be found empty, 300 ms apart. A page that restores its layout may open a notebook late.
  nb.closeAll = async (looks = 1) => {
    for (let empty = 0; empty < looks; ) {
      const panels = [...app().shell.widgets("main")].filter((widget) => widget.context);
      for (const panel of panels) {
        if (panel.sessionContext && panel.sessionContext.session) await nb.within(panel.sessionContext.shutdown(), "shutdown", 10000).catch(() => {});
        panel.dispose();
      }
      empty = panels.length && looks > 1 ? 0 : empty + 1;
      if (empty < looks) await new Promise((done) => setTimeout(done, 300));
    }
    await nb.within(app().serviceManager.sessions.shutdownAll(), "shutdown of all", 10000).catch(() => {});
    counts.clear();
  };
  nb.interrupt = async (path) => { await nb.kernel(path).interrupt(); };
})();
