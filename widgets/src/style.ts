/** Gives the one style sheet to the document or shadow root that holds a view. */

import css from "./styles.css";

let sheet: CSSStyleSheet | null = null;

function put(root: Document | ShadowRoot): void {
  sheet ??= new CSSStyleSheet();
  if (sheet.cssRules.length === 0) sheet.replaceSync(css);
  if (!root.adoptedStyleSheets.includes(sheet)) root.adoptedStyleSheets = [...root.adoptedStyleSheets, sheet];
}

function putPlain(root: Document | ShadowRoot): void {
  const target = root instanceof Document ? root.head : root;
  if (target.querySelector("style[data-mlxnb]")) return;
  const style = document.createElement("style");
  style.setAttribute("data-mlxnb", "");
  style.textContent = css;
  target.append(style);
}

/** Front ends draw an output before they attach it, so its root is looked for again once it is in the page. */
export function adopt(el: HTMLElement): () => void {
  const place = () => {
    const root = el.getRootNode();
    const target = root instanceof ShadowRoot ? root : (el.ownerDocument ?? document);
    if ("adoptedStyleSheets" in target && typeof CSSStyleSheet === "function") {
      try {
        put(target);
        return;
      } catch {
        /* a sheet of another document: fall through */
      }
    }
    putPlain(target);
  };
  place();
  const timer = el.isConnected ? 0 : requestAnimationFrame(place);
  return () => cancelAnimationFrame(timer);
}
