/** Where the quadjet program is, or why it was not found and what mends it. */
import { accessSync, constants, statSync } from "node:fs";
import { delimiter, isAbsolute, join } from "node:path";

export type Found = { path: string } | { problem: string };

/**
 * `configured` is the setting quadjet.path, `searchPath` the PATH. An editor started from a desktop often lacks the folder
 * that pip and pipx install to, so that one is looked at last.
 */
export function findExecutable(configured: string, searchPath: string, home: string): Found {
  if (configured !== "") {
    return checkConfigured(configured.startsWith("~/") ? join(home, configured.slice(2)) : configured);
  }
  const folders = [...searchPath.split(delimiter).filter(isAbsolute), join(home, ".local", "bin")];
  const path = folders.map((folder) => join(folder, "quadjet")).find(isExecutable);
  if (path !== undefined) {
    return { path };
  }
  return {
    problem:
      "The program quadjet was not found on PATH. Install it where this editor runs, or set quadjet.path to its full path.",
  };
}

function checkConfigured(path: string): Found {
  if (!isAbsolute(path)) {
    return { problem: `quadjet.path is ${path}, which is not a full path. Give one that starts with / or ~/.` };
  }
  if (!isExecutable(path)) {
    return {
      problem: `quadjet.path is ${path}, which is not a program that can be run. Correct it, or empty it to search PATH.`,
    };
  }
  return { path };
}

function isExecutable(path: string): boolean {
  try {
    accessSync(path, constants.X_OK);
    return statSync(path).isFile();
  } catch {
    return false; // not there, or not ours to run: the caller says so
  }
}
