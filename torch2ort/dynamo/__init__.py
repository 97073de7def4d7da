"""The backend of torch.compile: graphs that dynamo captured, differentiated by AOTAutograd, in sessions."""
