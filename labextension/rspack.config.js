// TypeScript straight from src/: the types are checked by `make check`, and a build needs none of them.
const { readFileSync } = require('fs');
const { join } = require('path');
const { DefinePlugin } = require('@rspack/core');

// What the widgets' build says of itself: the extension takes that very bundle, and no other.
const assets = JSON.parse(readFileSync(join(__dirname, '..', 'widgets', 'mlxnb_widgets', 'static', 'assets.json'), 'utf8'));

module.exports = {
  resolve: { extensions: ['.ts', '.js'] },
  plugins: [
    new DefinePlugin({ __BUNDLE__: JSON.stringify(assets.bundle), __VERSION__: JSON.stringify(assets.version) })
  ],
  module: {
    rules: [
      {
        test: /\.ts$/,
        loader: 'builtin:swc-loader',
        options: { jsc: { parser: { syntax: 'typescript' }, target: 'es2022' } },
        type: 'javascript/auto'
      }
    ]
  }
};
