"""The noun Graph: an exported model without its weights, and the file that holds both."""
