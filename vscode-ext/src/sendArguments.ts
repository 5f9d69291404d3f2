/** From what was clicked to the one argument of the send command. */
import type { Diagnostic, Position, Range } from "vscode-languageclient/node";
import type { SendToAgent, TaskKind } from "./protocol";

export interface Clicked {
  uri: string;
  /** Selection of the editor, if one was clicked. */
  selection?: Range;
  diagnostics: readonly Diagnostic[];
  instruction?: string;
}

/** A bare cursor selects nothing, so the whole file is sent; of a selection, only the diagnostics that touch it. */
export function sendArguments(kind: TaskKind, clicked: Clicked): SendToAgent {
  const range =
    clicked.selection && compare(clicked.selection.start, clicked.selection.end) !== 0 ? clicked.selection : undefined;
  const diagnostics = clicked.diagnostics.filter((item) => range === undefined || touches(item.range, range));
  const instruction = clicked.instruction?.trim();
  return {
    kind,
    uri: clicked.uri,
    ...(range && { range }),
    ...(diagnostics.length > 0 && { diagnostics }),
    ...(instruction && { instruction }),
  };
}

function touches(a: Range, b: Range): boolean {
  return compare(a.start, b.end) <= 0 && compare(b.start, a.end) <= 0;
}

function compare(a: Position, b: Position): number {
  return a.line - b.line || a.character - b.character;
}
