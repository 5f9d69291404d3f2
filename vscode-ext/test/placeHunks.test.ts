import assert from "node:assert/strict";
import { test } from "node:test";
import { placeHunks } from "../src/placeHunks";
import type { Hunk } from "../src/protocol";
import { makeHunk } from "./samples";

// The snapshot is a to l, a letter a line. The task makes d "D", inserts "x" before h and takes k away.
const DIFF = `--- a/f
+++ b/f
@@ -1,12 +1,12 @@
 a
 b
 c
-d
+D
 e
 f
 g
+x
 h
 i
 j
-k
 l
`;
const HUNKS = [
  makeHunk({ id: "change", oldStart: 4, oldLines: 1, text: "D\n" }),
  makeHunk({ id: "insert", oldStart: 8, oldLines: 0, text: "x\n" }),
  makeHunk({ id: "delete", oldStart: 11, oldLines: 1, text: "" }),
];
const lines = (letters: string, ending = "\n"): string => [...letters].map((letter) => letter + ending).join("");

function decided(states: Record<string, Hunk["state"]>): Hunk[] {
  return HUNKS.map((hunk) => ({ ...hunk, state: states[hunk.id] ?? hunk.state }));
}

test("in an unchanged file every hunk lands on its line", () => {
  assert.equal(placeHunks(lines("abcdefghijkl"), HUNKS, DIFF), lines("abcDefgxhijl"));
});

test("lines typed above and between move the hunks along", () => {
  assert.equal(placeHunks(lines("12abcdefghijkl3"), HUNKS, DIFF), lines("12abcDefgxhijl3"));
});

test("rejected hunks stay out", () => {
  assert.equal(placeHunks(lines("abcdefghijkl"), decided({ change: "rejected" }), DIFF), lines("abcdefgxhijl"));
});

test("accepted hunks are in the file already", () => {
  const hunks = decided({ change: "accepted", insert: "accepted" });
  assert.equal(placeHunks(lines("abcDefgxhijkl"), hunks, DIFF), lines("abcDefgxhijl"));
  assert.equal(placeHunks(lines("abcdefgxhijkl"), decided({ insert: "accepted" }), DIFF), lines("abcDefgxhijl"));
});

test("a file whose lines the person changed cannot be previewed", () => {
  assert.equal(placeHunks(lines("abc!efghijkl"), HUNKS, DIFF), undefined);
});

test("of two places that look alike the nearer is taken, and none if both are as near", () => {
  const diff = "--- a/f\n+++ b/f\n@@ -5,3 +5,3 @@\n a\n-b\n+B\n c\n";
  const hunks = [makeHunk({ oldStart: 6, text: "B\n" })];
  assert.equal(placeHunks(lines("....abcabc"), hunks, diff), lines("....aBcabc"));
  assert.equal(placeHunks(lines("..abc.abc"), hunks, diff), undefined);
});

test("endings of the file stay, whatever the diff was read with", () => {
  const hunks = [makeHunk({ oldStart: 2, text: "B\r\n" })];
  const diff = "--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n a\r\n-b\r\n+B\r\n c\n\\ No newline at end of file\n";
  assert.equal(placeHunks("a\r\nb\r\nc", hunks, diff), "a\r\nB\r\nc");
});

test("a removed line that looks like a header is a line", () => {
  const hunks = [makeHunk({ oldStart: 1, oldLines: 2, text: "" })];
  const diff = "--- a/f\n+++ b/f\n@@ -1,3 +1,1 @@\n--- a\n-@@ -9 +9 @@\n c\n";
  assert.equal(placeHunks("-- a\n@@ -9 +9 @@\nc\n", hunks, diff), "c\n");
});

test("a new file is its one hunk", () => {
  const hunks = [makeHunk({ oldStart: 1, oldLines: 0, newLines: 2, text: "a\nb\n" })];
  assert.equal(placeHunks("", hunks, "--- /dev/null\n+++ b/f\n@@ -0,0 +1,2 @@\n+a\n+b\n"), "a\nb\n");
});
