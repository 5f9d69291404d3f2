/** Wire shapes filled with defaults, for tests that care about a field or two. */
import type { Card, EventData, Hunk, Task, TaskEvent } from "../src/protocol";

export function makeTask(given: Partial<Task>): Task {
  return {
    taskId: "t1",
    kind: "cleanup",
    uri: "file:///shop/cart.py",
    rootUri: "file:///shop",
    range: null,
    instruction: "",
    state: "running",
    reason: null,
    message: "",
    created: 0,
    turns: 0,
    lastSeq: 0,
    card: null,
    hunkCounts: {},
    ...given,
  };
}

export function makeCard(given: Partial<Card>): Card {
  return {
    title: "Cleaned up cart.py",
    verified: true,
    summary: "",
    evidence: [],
    findings: {},
    notes: [],
    turns: 2,
    promptTokens: 0,
    cachedTokens: 0,
    completionTokens: 0,
    elapsedS: 1.5,
    ...given,
  };
}

export function makeHunk(given: Partial<Hunk>): Hunk {
  return {
    id: "h1",
    uri: "file:///shop/cart.py",
    baseVersion: null,
    oldStart: 1,
    oldLines: 1,
    newStart: 1,
    newLines: 1,
    text: "",
    state: "pending",
    ...given,
  };
}

export function makeEvent(taskId: string, seq: number, type: string, data: EventData): TaskEvent {
  return { taskId, seq, time: 0, type, data };
}
