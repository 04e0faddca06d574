/** Light or dark, as the page around the view says. JupyterLab, VS Code, Colab and marimo each say it in their own way. */

export type Theme = "light" | "dark" | "auto";

const watched = new Set<() => void>();
let observer: MutationObserver | null = null;

export function themeOfPage(): Theme {
  const { body, documentElement: root } = document;
  const jupyter = body?.getAttribute("data-jp-theme-light") ?? body?.querySelector("[data-jp-theme-light]")?.getAttribute("data-jp-theme-light");
  if (jupyter) return jupyter === "true" ? "light" : "dark";
  const names = `${body?.className ?? ""} ${root.className}`;
  if (/\bvscode-(dark|high-contrast)\b/.test(names) && !/\bvscode-high-contrast-light\b/.test(names)) return "dark";
  if (/\bvscode-/.test(names)) return "light";
  const named = root.getAttribute("theme") ?? root.getAttribute("data-theme") ?? body?.getAttribute("data-theme");
  if (named === "dark" || named === "light") return named;
  return /(^|\s)dark(\s|$)/.test(names) ? "dark" : "auto";
}

/** Keeps `data-theme` of el right until released. A setting other than "auto" wins over the page. */
export function followTheme(el: HTMLElement, setting: Theme): () => void {
  const apply = () => {
    const theme = setting === "auto" ? themeOfPage() : setting;
    if (theme === "auto") el.removeAttribute("data-theme");
    else el.setAttribute("data-theme", theme);
  };
  apply();
  watched.add(apply);
  if (!observer) {
    observer = new MutationObserver(() => watched.forEach((each) => each()));
    const options = { attributes: true, attributeFilter: ["class", "theme", "data-theme", "data-jp-theme-light"] };
    observer.observe(document.documentElement, options);
    if (document.body) observer.observe(document.body, options);
  }
  return () => {
    watched.delete(apply);
  };
}
