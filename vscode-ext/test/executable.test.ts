import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type TestContext, test } from "node:test";
import { findExecutable } from "../src/executable";

function makeHome(context: TestContext): string {
  const home = mkdtempSync(join(tmpdir(), "quadjet-home-"));
  context.after(() => rmSync(home, { recursive: true }));
  return home;
}

function place(folder: string, mode = 0o755): string {
  mkdirSync(folder, { recursive: true });
  const path = join(folder, "quadjet");
  writeFileSync(path, "#!/bin/sh\n", { mode });
  return path;
}

function problem(configured: string, searchPath: string, home: string): string {
  const found = findExecutable(configured, searchPath, home);
  return "problem" in found ? found.problem : `found ${found.path}`;
}

test("the first on PATH is taken, what cannot be run is passed over", (context) => {
  const home = makeHome(context);
  place(join(home, "a"), 0o644);
  mkdirSync(join(home, "b", "quadjet"), { recursive: true });
  const path = place(join(home, "c"));
  assert.deepEqual(findExecutable("", ["a", "b", "c"].map((name) => join(home, name)).join(":"), home), { path });
});

test("relative parts of PATH are not searched: a repository could be there", (context) => {
  const home = makeHome(context);
  assert.match(problem("", ".:bin:", home), /not found on PATH.*quadjet\.path/s);
});

test("the user's own bin folder is searched last", (context) => {
  const home = makeHome(context);
  const path = place(join(home, ".local", "bin"));
  assert.deepEqual(findExecutable("", "/nowhere", home), { path });
});

test("the setting wins over PATH, and may start at home", (context) => {
  const home = makeHome(context);
  place(join(home, "bin"));
  const path = place(join(home, "venv", "bin"));
  assert.deepEqual(findExecutable("~/venv/bin/quadjet", join(home, "bin"), home), { path });
});

test("a setting that is wrong is not quietly replaced by what PATH has", (context) => {
  const home = makeHome(context);
  place(join(home, "bin"));
  assert.match(problem("/nowhere/quadjet", join(home, "bin"), home), /\/nowhere\/quadjet, which is not a program/);
  assert.match(problem("bin/quadjet", join(home, "bin"), home), /not a full path/);
});
