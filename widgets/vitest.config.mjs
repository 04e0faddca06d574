import { defineConfig } from "vitest/config";

import { SLIM } from "./slim.mjs";

export default defineConfig({
  resolve: { alias: SLIM },
  define: { __VERSION__: '"test"', __BUNDLE__: '"test"' },
  test: {
    environment: "jsdom",
    include: ["tests/**/*.test.{ts,tsx}"],
    // A busy machine is slow; a test that hangs is caught all the same.
    testTimeout: 30_000,
    // markdown-it must take the stand-ins too, as it does in the bundle.
    server: { deps: { inline: ["markdown-it"] } },
  },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
});
