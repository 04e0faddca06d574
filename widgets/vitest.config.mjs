import { defineConfig } from "vitest/config";

import { SLIM } from "./slim.mjs";

export default defineConfig({
  resolve: { alias: SLIM },
  define: { __VERSION__: '"test"', __BUNDLE__: '"test"' },
  test: {
    environment: "jsdom",
    include: ["tests/**/*.test.{ts,tsx}"],
    // markdown-it must take the stand-ins too, as it does in the bundle.
    server: { deps: { inline: ["markdown-it"] } },
  },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
});
