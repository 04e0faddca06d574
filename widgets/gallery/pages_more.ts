/** Samples of every kind of view but the single run, by kind and name. */

import type { Sample } from "./samples";
import * as s from "./samples_more";
import * as t from "./samples_trees";

export const MORE: Readonly<Record<string, Readonly<Record<string, Sample>>>> = {
  compare: {
    done: { title: "A sweep, finished", kind: "compare", record: s.compareDone, live: true },
    live: { title: "Filling, with -n 4", kind: "compare", record: s.compareLive, live: true },
    votes: { title: "Eight samples, and which say the same", kind: "compare", record: s.compareVotes },
    mixed: { title: "--each: code, a table, right-to-left, failed, stopped", kind: "compare", record: s.compareMixed },
  },
  chat: {
    done: { title: "A conversation", kind: "chat", record: s.chatDone, live: true },
    tree: { title: "The tree, and a fork", kind: "chat", record: s.chatTree, live: true },
    live: { title: "An answer is being written", kind: "chat", record: s.chatLive, live: true },
    stale: { title: "A turn was edited: later ones are kept aside", kind: "chat", record: s.chatStale, live: true },
    failed: { title: "Failed, saved", kind: "chat", record: s.chatFailed },
    empty: { title: "Empty", kind: "chat", record: s.chatEmpty, live: true },
  },
  monitor: {
    busy: { title: "At work", kind: "monitor", record: null, live: true, feed: s.monitorBusy() },
    full: { title: "Memory nearly full", kind: "monitor", record: null, live: true, feed: s.monitorFull },
    idle: { title: "Idle", kind: "monitor", record: null, live: true, feed: s.monitorIdle },
    loading: { title: "Loading", kind: "monitor", record: null, live: true, feed: s.monitorLoading },
    dead: { title: "Stopped by an error", kind: "monitor", record: null, live: true, feed: s.monitorDead },
    none: { title: "No news yet", kind: "monitor", record: null, live: true },
  },
  playground: {
    done: { title: "A prompt with sliders", kind: "playground", record: s.playgroundDone, live: true },
    live: { title: "Running", kind: "playground", record: s.playgroundLive, live: true },
    empty: { title: "Empty", kind: "playground", record: s.playgroundEmpty, live: true },
  },
  stepper: {
    ready: { title: "One step", kind: "stepper", record: s.stepperReady, live: true },
    greedy: { title: "Greedy: no filter, no draw", kind: "stepper", record: s.stepperGreedy, live: true },
    failed: { title: "Failed", kind: "stepper", record: s.stepperFailed, live: true },
    done: { title: "Ended, saved", kind: "stepper", record: s.stepperDone },
    loading: { title: "Loading", kind: "stepper", record: s.stepperLoading, live: true },
  },
  loom: {
    live: { title: "Sixteen samples, one tree", kind: "loom", record: t.loomLive, live: true },
    grown: { title: "Opened by hand, and a continuation", kind: "loom", record: t.loomGrown, live: true },
    greedy: { title: "Temperature 0, saved", kind: "loom", record: t.loomOne },
    empty: { title: "No token yet", kind: "loom", record: t.loomEmpty, live: true },
    poor: { title: "Saved without tokens", kind: "loom", record: t.loomPoor },
  },
  cache: {
    tree: { title: "Who shares what", kind: "cache", record: t.cacheTree, live: true },
    large: { title: "Ten thousand blocks", kind: "cache", record: t.cacheLarge, live: true },
    empty: { title: "Nothing cached yet", kind: "cache", record: t.cacheEmpty, live: true },
    off: { title: "Off, saved", kind: "cache", record: t.cacheOff },
  },
};
