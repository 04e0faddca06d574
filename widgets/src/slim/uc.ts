/** In place of uc.micro at build time: browsers know the classes of Unicode, so their tables need not travel. */

export const Any = /[^]/u;
export const Cc = /\p{Cc}/u;
export const Cf = /\p{Cf}/u;
export const P = /\p{P}/u;
export const S = /\p{S}/u;
export const Z = /\p{Z}/u;
