"""The command ``fsdp-offload``: tools for before, beside and after a job.

:data:`.main.COMMANDS` names the subcommands. :func:`.main.main` imports the module of one when it
runs, since ``--help`` must not wait for torch.
"""
