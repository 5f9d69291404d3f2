import assert from "node:assert/strict";
import { test } from "node:test";
import type { Range } from "vscode-languageclient/node";
import { sendArguments } from "../src/sendArguments";

const uri = "file:///shop/cart.py";

function range(startLine: number, startCharacter: number, endLine: number, endCharacter: number): Range {
  return { start: { line: startLine, character: startCharacter }, end: { line: endLine, character: endCharacter } };
}

test("a file without more", () => {
  assert.deepEqual(sendArguments("cleanup", { uri, diagnostics: [] }), { kind: "cleanup", uri });
});

test("a bare cursor sends the whole file with all its diagnostics", () => {
  const diagnostics = [{ range: range(9, 0, 9, 4), message: "unused" }];
  assert.deepEqual(sendArguments("cleanup", { uri, selection: range(2, 3, 2, 3), diagnostics }), {
    kind: "cleanup",
    uri,
    diagnostics,
  });
});

test("a selection sends the diagnostics that touch it", () => {
  const [above, across, within, below] = [range(0, 0, 0, 5), range(1, 0, 2, 1), range(3, 0, 3, 1), range(4, 1, 4, 2)];
  const diagnostics = [above, across, within, below].map((item) => ({ range: item, message: "" }));
  const sent = sendArguments("triage", { uri, selection: range(2, 0, 4, 0), diagnostics });
  assert.deepEqual(
    sent.diagnostics?.map((item) => item.range),
    [across, within],
  );
  assert.deepEqual(sent.range, range(2, 0, 4, 0));
});

test("an instruction is trimmed, and left out when there is none", () => {
  assert.equal(sendArguments("triage", { uri, diagnostics: [], instruction: " keep the names\n" }).instruction, "keep the names");
  assert.equal("instruction" in sendArguments("triage", { uri, diagnostics: [], instruction: "  " }), false);
});
