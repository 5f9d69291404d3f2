/** Words and icons for tasks, as plain data. */
import { basename } from "node:path";
import { fileURLToPath } from "node:url";
import type { Card, Evidence, Task, TaskKind, TaskState } from "./protocol";
import { hasOpenHunks, isDecidable, isFinal, wantsAttention } from "./taskModel";

export interface TaskLabel {
  label: string;
  description: string;
  /** Plain text, line by line. */
  tooltip: string;
  icon: string;
  /** Space-separated words that the menus in package.json ask for. */
  contextValue: string;
}

export interface StatusLabel {
  text: string;
  tooltip: string;
  warns: boolean;
}

const KINDS: Record<TaskKind, string> = { cleanup: "Clean up", triage: "Find the cause" };

const ICONS: Record<TaskState, string> = {
  queued: "clock",
  running: "sync~spin",
  "waiting-tool": "tools",
  "needs-you": "bell-dot",
  paused: "debug-pause",
  verifying: "beaker",
  proposed: "git-pull-request",
  accepted: "check",
  rejected: "circle-slash",
  failed: "error",
  stopped: "debug-stop",
};

export function describeTask(task: Task): TaskLabel {
  return {
    label: taskTitle(task),
    description: [stateText(task), ...messageOf(task)].join(" · "),
    tooltip: cardText(task).trimEnd(),
    icon: ICONS[task.state],
    contextValue: menuWords(task).join(" "),
  };
}

export function taskTitle(task: Task): string {
  const lines = task.range ? `:${task.range.first}-${task.range.last}` : "";
  return `${KINDS[task.kind]} ${basename(filePath(task.uri))}${lines}`;
}

/** A proposal is ended by accept or reject, not by stop. */
export function canStop(task: Task): boolean {
  return !isFinal(task) && task.state !== "proposed";
}

/** The result of a task as a document to read. */
export function cardText(task: Task): string {
  const head = [taskTitle(task), filePath(task.uri), [stateText(task), ...messageOf(task)].join(": ")];
  const instruction = task.instruction ? [`Instruction: ${oneLine(task.instruction)}`] : [];
  return `${[...head, ...instruction, ...(task.card ? ["", ...cardLines(task.card)] : [])].join("\n")}\n`;
}

/** `problem`: why there is no connection. */
export function describeStatus(tasks: readonly Task[], problem: string | undefined): StatusLabel {
  if (problem !== undefined) {
    return { text: "$(warning) Quadjet", tooltip: `${problem}\nClick to connect.`, warns: true };
  }
  const waiting = tasks.filter((task) => task.state === "needs-you").length;
  const review = tasks.filter((task) => task.state === "proposed").length;
  const working = tasks.filter((task) => !isFinal(task) && !wantsAttention(task)).length;
  const parts = [
    working ? `$(sync~spin) ${working}` : "",
    review ? `$(git-pull-request) ${review}` : "",
    waiting ? `$(bell-dot) ${waiting}` : "",
  ].filter(Boolean);
  return {
    text: parts.length > 0 ? `Quadjet ${parts.join(" ")}` : "Quadjet",
    tooltip: `Quadjet: ${working} working, ${review} to review, ${waiting} waiting for you`,
    warns: waiting > 0,
  };
}

function stateText(task: Task): string {
  if (task.state === "needs-you") {
    return task.reason ? `needs you (${task.reason})` : "needs you";
  }
  if (task.state === "proposed") {
    return task.card?.verified ? "to review, verified" : "to review, not verified";
  }
  return task.state === "waiting-tool" ? "running a tool" : task.state;
}

/** What it does or why it stands, unless that is the state's name once more. */
function messageOf(task: Task): string[] {
  return task.message === "" || task.message === task.state ? [] : [oneLine(task.message)];
}

function menuWords(task: Task): string[] {
  return [
    ...(hasOpenHunks(task) ? ["review"] : []),
    ...(isDecidable(task) ? ["decide"] : []),
    ...(canStop(task) ? ["stop"] : []),
  ];
}

function cardLines(card: Card): string[] {
  return [
    `${card.title} (${card.verified ? "verified" : "not verified"})`,
    ...(card.summary ? [card.summary] : []),
    ...card.evidence.map(evidenceLine),
    ...Object.entries(card.findings).flatMap(([name, value]) => findingLines(name, value)),
    ...card.notes.map((note) => `Note: ${oneLine(note)}`),
    `${card.elapsedS.toFixed(0)} s, ${card.turns === 0 ? "no model was needed" : `${card.turns} turns`}`,
  ];
}

function evidenceLine({ name, passed, command, detail }: Evidence): string {
  const mark = passed === null ? "not run" : passed ? "ok" : "FAILED";
  return `[${mark}] ${name}${command ? ` (${command})` : ""}: ${oneLine(detail)}`;
}

function findingLines(name: string, value: unknown): string[] {
  const values = Array.isArray(value) ? value : [value];
  return values.filter((item) => item !== "" && item !== null).map((item) => `${name}: ${oneLine(String(item))}`);
}

export function filePath(uri: string): string {
  return uri.startsWith("file:") ? fileURLToPath(uri) : uri;
}

function oneLine(text: string): string {
  return text.replace(/\s+/g, " ").trim();
}
