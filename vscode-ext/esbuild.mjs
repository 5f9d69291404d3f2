// Bundles the extension, or with --tests the unit tests, into out/.
import { readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { build } from "esbuild";

const tests = process.argv.includes("--tests");
const testFiles = readdirSync("test").filter((name) => name.endsWith(".test.ts"));
const outdir = tests ? "out/test" : "out";
if (tests) {
  rmSync(outdir, { recursive: true, force: true }); // a deleted test must not run on
}
const { metafile } = await build({
  entryPoints: tests ? testFiles.map((name) => `test/${name}`) : ["src/extension.ts"],
  outdir,
  bundle: true,
  platform: "node",
  format: "cjs",
  target: "node20",
  external: tests ? [] : ["vscode"], // so a tested file that imports vscode fails to build
  minify: !tests,
  sourcemap: tests ? "inline" : false,
  legalComments: "none", // the licences go into a file of their own
  metafile: true,
  logLevel: "warning",
});
if (!tests) {
  writeFileSync("out/licenses.txt", licenses(Object.keys(metafile.inputs)));
}

/** The licence texts of the packages in the bundle, which ask to go along with it. */
function licenses(inputs) {
  const folders = new Set(inputs.map((path) => /^.*node_modules\/(?:@[^/]+\/)?[^/]+/.exec(path)?.[0]).filter(Boolean));
  const texts = [...folders].sort().map((folder) => {
    const name = readdirSync(folder).find((file) => /^licen[cs]e/i.test(file));
    if (name === undefined) {
      throw new Error(`${folder} has no licence file`);
    }
    return `${folder.replace(/^.*node_modules\//, "")}\n\n${readFileSync(join(folder, name), "utf8").trim()}\n`;
  });
  return texts.join(`\n${"-".repeat(80)}\n\n`);
}
