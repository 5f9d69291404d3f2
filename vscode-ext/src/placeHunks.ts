/**
 * A preview of an accept: the open hunks of a proposal in the file as it is now. The snapshot itself is not on the wire; the
 * diff has the lines it had around each hunk, and those are looked for. The merge that counts is the daemon's.
 */
import type { Hunk } from "./protocol";

const CONTEXT = 3;
const LINE = /[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$/g;
const HEADER = /^@@ -(\d+)(?:,(\d+))? \+/;

/** `text` with all open hunks, or undefined if the lines of one are no longer there (or not where they can be told apart). */
export function placeHunks(text: string, hunks: readonly Hunk[], diff: string): string | undefined {
  const lines = splitLines(text);
  const plain = lines.map(withoutEnding);
  const snapshot = snapshotLines(diff);
  for (const hunk of hunks.filter((item) => item.state === "accepted")) {
    forget(snapshot, hunk); // they are in the file already, and no context for the others
  }
  const placed: string[] = [];
  let next = 0; // first line that no hunk has taken
  let shift = 0; // how far the last hunk lay from where the snapshot had it
  for (const hunk of hunks.filter((item) => item.state === "pending" || item.state === "conflict")) {
    const first = hunk.oldStart - 1;
    const at = find(plain, hunk, snapshot, first + shift, next);
    if (at === undefined) {
      return undefined;
    }
    placed.push(...lines.slice(next, at), hunk.text);
    next = at + hunk.oldLines;
    shift = at - first;
  }
  return [...placed, ...lines.slice(next)].join("");
}

/** Where the hunk's old lines with their context are, nearest to `expected` and not before `from`. */
function find(
  plain: readonly string[],
  hunk: Hunk,
  snapshot: ReadonlyMap<number, string>,
  expected: number,
  from: number,
): number | undefined {
  const before = known(snapshot, hunk.oldStart - 1, -1, CONTEXT).reverse();
  const old = known(snapshot, hunk.oldStart, 1, hunk.oldLines);
  const after = known(snapshot, hunk.oldStart + hunk.oldLines, 1, CONTEXT);
  if (old.length < hunk.oldLines) {
    return undefined;
  }
  const needle = [...before, ...old, ...after];
  if (needle.length === 0) {
    return plain.length === 0 ? 0 : undefined; // text for a file that was empty
  }
  const found: number[] = [];
  for (let at = Math.max(from, before.length); at + old.length + after.length <= plain.length; at++) {
    if (needle.every((line, index) => plain[at - before.length + index] === line)) {
      found.push(at);
    }
  }
  const [best, second] = found.sort((a, b) => Math.abs(a - expected) - Math.abs(b - expected));
  const isTie = best !== undefined && second !== undefined && Math.abs(best - expected) === Math.abs(second - expected);
  return isTie ? undefined : best;
}

/** Up to `count` lines of the snapshot from `start` in one direction, as far as the diff has them without a hole. */
function known(snapshot: ReadonlyMap<number, string>, start: number, step: 1 | -1, count: number): string[] {
  const lines: string[] = [];
  for (let index = 0; index < count; index++) {
    const line = snapshot.get(start + index * step);
    if (line === undefined) {
      break;
    }
    lines.push(line);
  }
  return lines;
}

/** The lines of the old file that a unified diff shows, by their number, without endings. */
function snapshotLines(diff: string): Map<number, string> {
  const lines = new Map<number, string>();
  let number = 0;
  let left = 0; // old lines still to come in this group, so that a removed "-- x" is not taken for a file header
  for (const line of splitLines(diff).map(withoutEnding)) {
    const header = HEADER.exec(line);
    if (left === 0 && header !== null) {
      number = Number(header[1]);
      left = Number(header[2] ?? 1);
    } else if (left > 0 && (line.startsWith(" ") || line.startsWith("-"))) {
      lines.set(number++, line.slice(1));
      left--;
    }
  }
  return lines;
}

function forget(snapshot: Map<number, string>, hunk: Hunk): void {
  // An insertion takes no line away, but the two beside it are neighbours no more. Hunks never touch, so neither is another's.
  const [first, count] = hunk.oldLines === 0 ? [hunk.oldStart - 1, 2] : [hunk.oldStart, hunk.oldLines];
  for (let line = first; line < first + count; line++) {
    snapshot.delete(line);
  }
}

function splitLines(text: string): string[] {
  return text.match(LINE) ?? [];
}

function withoutEnding(line: string): string {
  return line.replace(/[\r\n]+$/, "");
}
