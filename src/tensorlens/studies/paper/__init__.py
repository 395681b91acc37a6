"""The paper's own tables, one command each: its models, its protocol, its numbers beside ours."""
