/** The part of Temml that we use; its own types describe the other entry, which brings extensions we leave out. */
declare module "temml/temml.js" {
  interface Tree {
    readonly children?: readonly Tree[];
    classes?: string[];
    style?: Record<string, string | undefined>;
    toMarkup(): string;
  }
  const temml: { __renderToMathMLTree(tex: string, options: object): Tree };
  export default temml;
}
