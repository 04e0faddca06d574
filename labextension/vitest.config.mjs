// Run by the widgets' vitest: its names are globals here, so that this folder needs no second copy of it.
export default { test: { globals: true, environment: 'node', include: ['tests/**/*.test.ts'] } };
