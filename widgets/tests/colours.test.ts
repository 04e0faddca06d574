/// <reference types="node" />
/** The colours of the style sheet, measured: contrast of all text, and what a person with another sight can tell apart. */

import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { describe, expect, it } from "vitest";

const css = readFileSync(join(dirname(fileURLToPath(import.meta.url)), "..", "src", "styles.css"), "utf8");

type Rgb = readonly [number, number, number];
const THEMES = ["light", "dark"] as const;
type Theme = (typeof THEMES)[number];

function hex(code: string): Rgb {
  const long = code.length === 4 ? [...code.slice(1)].map((c) => c + c).join("") : code.slice(1);
  return [0, 2, 4].map((at) => parseInt(long.slice(at, at + 2), 16) / 255) as unknown as Rgb;
}

/** A variable of the sheet as it is outside of JupyterLab: the fallback, or the mix of two others. */
function colour(name: string, theme: Theme): Rgb {
  const value = new RegExp(`--mlxnb-${name}: (.+?);`).exec(css)?.[1];
  if (!value) throw new Error(`no colour ${name}`);
  const both = /light-dark\((#[0-9a-f]+), (#[0-9a-f]+)\)/.exec(value);
  if (both) return hex(both[theme === "light" ? 1 : 2] as string);
  const mix = /color-mix\(in srgb, var\(--mlxnb-(\S+?)\) ([\d.]+)%, var\(--mlxnb-(\S+?)\)\)/.exec(value);
  if (!mix) throw new Error(`cannot read ${value}`);
  const [over, under, share] = [colour(mix[1] as string, theme), colour(mix[3] as string, theme), Number(mix[2]) / 100];
  return over.map((part, i) => part * share + (under[i] as number) * (1 - share)) as unknown as Rgb;
}

const linear = (rgb: Rgb): Rgb => rgb.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)) as unknown as Rgb;

function contrast(a: Rgb, b: Rgb): number {
  const y = (rgb: Rgb) => {
    const [r, g, b] = linear(rgb);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [high, low] = [y(a), y(b)].sort((one, two) => two - one) as [number, number];
  return (high + 0.05) / (low + 0.05);
}

/** Machado, Oliveira and Fernandes 2009, full severity, on linear RGB. */
const SIGHTS: Readonly<Record<string, readonly (readonly number[])[]>> = {
  normal: [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
  protan: [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  deutan: [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
  tritan: [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
};

/** OKLab of a colour as seen with this sight, times 100. */
function lab(rgb: Rgb, sight: string): Rgb {
  const of = linear(rgb);
  const [r, g, b] = SIGHTS[sight]!.map((row) => Math.min(1, Math.max(0, row.reduce((sum, factor, i) => sum + factor * (of[i] as number), 0)))) as unknown as Rgb;
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    100 * (0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s),
    100 * (1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s),
    100 * (0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s),
  ];
}

const apart = (a: Rgb, b: Rgb, sight: string): number => Math.hypot(...lab(a, sight).map((part, i) => part - (lab(b, sight)[i] as number)));

const SURFACES = ["bg", "raised", "sunken", "hover", "accent-soft"];
const ORIGINS = ["cached", "prompt", "sampled", "filled", "echo", "drafted", "forced"].map((name) => `o-${name}`);
const steps = (ramp: string): string[] => [1, 2, 3, 4, 5, 6].map((step) => `${ramp}-${step}`);

describe.each(THEMES)("%s", (theme) => {
  it("text has 4.5:1 on every surface it stands on", () => {
    const low = SURFACES.flatMap((surface) =>
      ["ink", "ink-2", "accent", "ok", "warn", "err"].map((ink) => [ink, surface, contrast(colour(ink, theme), colour(surface, theme))] as const),
    ).filter(([, , ratio]) => ratio < 4.5);
    expect(low).toEqual([]);
    expect(contrast(colour("on-accent", theme), colour("accent", theme))).toBeGreaterThanOrEqual(4.5);
  });

  it("text of a token, and the sign of its white space, can be read on every step of both ramps", () => {
    for (const step of [...steps("unsure"), ...steps("slow")]) {
      expect(contrast(colour("ink", theme), colour(step, theme)), step).toBeGreaterThanOrEqual(4.5);
    }
  });

  it("every line of a control, every glyph and every underline has 3:1 on the page", () => {
    const low = [...ORIGINS, "mark", "seq-4", "seq-5"].map((name) => [name, contrast(colour(name, theme), colour("bg", theme))] as const).filter(([, ratio]) => ratio < 3);
    expect(low).toEqual([]);
  });

  it.each(Object.keys(SIGHTS))("origins can be told apart with %s sight", (sight) => {
    const close = ORIGINS.flatMap((one, i) => ORIGINS.slice(i + 1).map((other) => [one, other, apart(colour(one, theme), colour(other, theme), sight)] as const)).filter(([, , distance]) => distance < 8);
    expect(close).toEqual([]);
  });

  it.each(Object.keys(SIGHTS))("every ramp only darkens or only lightens with %s sight", (sight) => {
    for (const ramp of ["unsure", "slow", "seq"]) {
      const lightness = steps(ramp).map((step) => lab(colour(step, theme), sight)[0]);
      const moves = lightness.slice(1).map((l, i) => l - (lightness[i] as number));
      const way = Math.sign(moves[0] as number);
      expect(moves.every((move) => Math.sign(move) === way && Math.abs(move) > 0.8), `${ramp} ${lightness.map((l) => l.toFixed(1)).join(" ")}`).toBe(true);
    }
  });
});

it("a measure that could not fail would be none", () => {
  expect(contrast([1, 1, 1], [0, 0, 0])).toBeCloseTo(21, 5);
  expect(apart(hex("#ff0000"), hex("#008000"), "normal")).toBeGreaterThan(30);
  expect(apart(hex("#d00000"), hex("#8a7a00"), "deutan")).toBeLessThan(apart(hex("#d00000"), hex("#8a7a00"), "normal"));
});

it("motion stops where a person wants none, and nothing else loops than the caret and the live dot", () => {
  expect(css).toMatch(/@media \(prefers-reduced-motion: reduce\) \{\s*\.mlxnb \*, \.mlxnb \*::before, \.mlxnb \*::after \{ animation: none !important; transition: none !important; \}/);
  const looping = [...css.matchAll(/animation: (\S+) [^;]*infinite/g)].map((match) => match[1]);
  expect(looping.sort()).toEqual(["mlxnb-caret", "mlxnb-live"]);
});
