"""The language of sizes: expressions over symbols, and the symbols of a traced program."""
