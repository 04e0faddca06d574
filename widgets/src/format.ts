/** Figures as a person reads them: unit after a thin gap, never more digits than mean something. Same rules as mlxnb/render.py. */

const THIN = "\u2009";

/** 74 ms, 9.8 s, 3 min 05 s. */
export function duration(seconds: number): string {
  if (seconds < 0.9995) {
    const ms = seconds * 1000;
    return `${ms < 9.95 && ms > 0 ? ms.toFixed(1) : ms.toFixed(0)}${THIN}ms`;
  }
  if (seconds < 59.95) return `${seconds.toFixed(1)}${THIN}s`;
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)}${THIN}min ${String(whole % 60).padStart(2, "0")}${THIN}s`;
}

/** Bytes in decimal units, as registries and disks state them. */
export function bytes(count: number): string {
  let value = count;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 999.5 || unit === "GB") {
      const shown = unit === "B" || unit === "kB" || value >= 99.95 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
      return `${shown}${THIN}${unit}`;
    }
    value /= 1000;
  }
  return "";
}

export const whole = (count: number): string => Math.round(count).toLocaleString("en");

/** 14.6 tok/s, 205 tok/s. */
export function speed(perSecond: number): string {
  return `${perSecond >= 999.5 ? whole(perSecond) : String(Number(perSecond.toPrecision(3)))}${THIN}tok/s`;
}

/** A probability without its zero: .934, 1.00, <.001. */
export function probability(p: number): string {
  if (p >= 0.9995) return "1.00";
  return p < 0.0005 ? "<.001" : p.toFixed(3).slice(1);
}

export const plural = (count: number, word: string): string => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;
