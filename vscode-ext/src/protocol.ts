/**
 * Every name and shape on the wire that is not LSP's own. Mirrors lsp/messages.py; tests/test_wire_names.py compares the two.
 */
import type { Diagnostic, Range } from "vscode-languageclient/node";

export const PROTOCOL_VERSION = 1;

/** workspace/executeCommand with one SendToAgent; answers {taskId} at once. The language client registers this id: we must not. */
export const SEND_TO_AGENT = "quadjet.sendToAgent";

export const SUBSCRIBE = "agent/subscribe";
export const TASKS = "agent/tasks";
export const TASK = "agent/task";
export const HUNKS = "agent/hunks";
export const ACCEPT = "agent/accept";
export const REJECT = "agent/reject";
export const STOP_TASK = "agent/stop";
export const PAUSE = "agent/pause";
export const RESUME = "agent/resume";
export const STATUS = "agent/status";
export const STOP_DAEMON = "quadjet/stop";

export const TASK_EVENT = "agent/taskEvent";

/** LSP's code for a request that was well formed but could not be done; data is {fix}. */
export const REQUEST_FAILED = -32803;

export type TaskKind = "cleanup" | "triage";

export type TaskState =
  | "queued"
  | "running"
  | "waiting-tool"
  | "needs-you"
  | "paused"
  | "verifying"
  | "proposed"
  | "accepted"
  | "rejected"
  | "failed"
  | "stopped";

export type NeedsYou = "approval" | "question" | "stuck" | "budget" | "restart" | "conflict";

export type HunkState = "pending" | "accepted" | "rejected" | "conflict";

export type ChangeKind = "modify" | "create" | "delete";

/** Without `range` the whole file is meant. */
export interface SendToAgent {
  kind: TaskKind;
  uri: string;
  range?: Range;
  diagnostics?: Diagnostic[];
  instruction?: string;
}

export interface TaskParams {
  taskId: string;
}

/** Without `taskId`: all tasks, those to come included. */
export interface SubscribeParams {
  taskId?: string;
  afterSeq: number;
}

/** Without `hunkIds`: all pending hunks. */
export interface AcceptParams {
  taskId: string;
  hunkIds?: string[];
}

export interface RejectParams {
  taskId: string;
  hunkIds?: string[];
  comment?: string;
}

/** Lines first to last, both included, counted from 1. */
export interface LineRange {
  first: number;
  last: number;
}

/** `created` is seconds since the epoch. */
export interface Task {
  taskId: string;
  kind: TaskKind;
  uri: string;
  rootUri: string;
  range: LineRange | null;
  instruction: string;
  state: TaskState;
  reason: NeedsYou | null;
  message: string;
  created: number;
  turns: number;
  lastSeq: number;
  card: Card | null;
  hunkCounts: Partial<Record<HunkState, number>>;
}

/** `passed` null: the check could not be run, and `detail` says why. */
export interface Evidence {
  name: string;
  passed: boolean | null;
  command: string;
  detail: string;
}

export interface Card {
  title: string;
  verified: boolean;
  summary: string;
  evidence: Evidence[];
  findings: Record<string, unknown>;
  notes: string[];
  turns: number;
  promptTokens: number;
  cachedTokens: number;
  completionTokens: number;
  elapsedS: number;
}

/** `oldLines` lines of the snapshot from `oldStart` (counted from 1) become `text`; 0 lines insert before line `oldStart`. */
export interface Hunk {
  id: string;
  uri: string;
  baseVersion: number | null;
  oldStart: number;
  oldLines: number;
  newStart: number;
  newLines: number;
  text: string;
  state: HunkState;
}

/** `flagged`: why to look twice, or empty. `diff`: of all hunks against the snapshot, unified, with three lines of context. */
export interface ChangedFile {
  uri: string;
  kind: ChangeKind;
  flagged: string;
  diff: string;
}

export interface Proposal {
  hunks: Hunk[];
  files: ChangedFile[];
}

export interface Conflict {
  uri: string;
  message: string;
}

export interface AcceptResult {
  task: Task;
  applied: string[];
  conflicts: Conflict[];
}

export interface TasksAnswer {
  tasks: Task[];
}

export interface SubscribeAnswer {
  tasks: { taskId: string; lastSeq: number }[];
}

export interface SendAnswer {
  taskId: string;
}

/** `seq` counts from 1 without gaps per task. The types that change what is shown; others only move `seq`. */
export interface TaskEvent {
  taskId: string;
  seq: number;
  time: number;
  type: string;
  data: EventData;
}

export interface EventData {
  /** state */
  state?: TaskState;
  reason?: NeedsYou | null;
  /** state, progress */
  message?: string;
  /** progress */
  done?: number;
  total?: number;
  /** turn */
  number?: number;
  /** card */
  card?: Card;
  /** hunks */
  hunks?: Hunk[];
}
