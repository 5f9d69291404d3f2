/** Failures in words for a person. */

/** What happened and what mends it; the daemon's errors carry the latter as data.fix. */
export function explain(error: unknown): string {
  const message = error instanceof Error ? error.message : String(error);
  const fix = fixOf(error);
  return fix === undefined ? message : `${sentence(message)} ${sentence(capital(fix))}`;
}

/** Notifications turn [text](command:...) into a link that runs the command; text from a model or a repository must not. */
export function withoutLinks(text: string): string {
  return text.replaceAll("](", "] (");
}

function fixOf(error: unknown): string | undefined {
  const data = hasKey(error, "data") ? error.data : undefined;
  const fix = hasKey(data, "fix") ? data.fix : undefined;
  return typeof fix === "string" && fix !== "" ? fix : undefined;
}

function hasKey<K extends string>(value: unknown, key: K): value is Record<K, unknown> {
  return typeof value === "object" && value !== null && key in value;
}

function capital(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function sentence(text: string): string {
  return /[.!?]$/.test(text) ? text : `${text}.`;
}
