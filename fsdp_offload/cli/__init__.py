"""The command ``fsdp-offload``: what a user asks before, beside and after a job.

:data:`.main.COMMANDS` names the subcommands. A subcommand is a module that is imported when it is
asked for, since ``--help`` must not wait for torch.
"""
