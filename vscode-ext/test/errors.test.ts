import assert from "node:assert/strict";
import { test } from "node:test";
import { ResponseError } from "vscode-jsonrpc";
import { explain, withoutLinks } from "../src/errors";

test("the daemon's fix follows its message", () => {
  const error = new ResponseError(-32803, "/shop/x.py does not exist", { fix: "save the document first" });
  assert.equal(explain(error), "/shop/x.py does not exist. Save the document first.");
});

test("an error without a fix is its message", () => {
  assert.equal(explain(new ResponseError(-32602, "range has a negative line")), "range has a negative line");
  assert.equal(explain("closed"), "closed");
});

test("no text becomes a link", () => {
  assert.equal(withoutLinks("see [here](command:x)"), "see [here] (command:x)");
});
