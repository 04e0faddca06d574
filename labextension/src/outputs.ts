/** Reading outputs of a notebook, which may hold anything. */

import type { IOutput } from '@jupyterlab/nbformat';

export type Dict = Readonly<Record<string, unknown>>;
export const RUN_MIME = 'application/vnd.mlxnb.run.v1+json';
export const WIDGET_MIME = 'application/vnd.jupyter.widget-view+json';

export const isDict = (value: unknown): value is Dict => typeof value === 'object' && value !== null && !Array.isArray(value);
export const entries = (value: unknown): Dict[] => (Array.isArray(value) ? value.filter(isDict) : []);
export const dataOf = (output: IOutput): Dict => (isDict(output.data) ? output.data : {});
