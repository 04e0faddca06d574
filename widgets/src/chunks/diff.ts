/** On demand: word differences between answers. */

export { diffArrays, diffLines, diffWordsWithSpace } from "diff";
