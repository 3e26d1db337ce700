"""Obtaining and giving back nodes: ``static`` (agents are already there) and ``ec2`` (boto3).

API: ``static.StaticProvisioner``; ``ec2.Ec2Provisioner(settings, client_of)``. A provisioner has ``obtainable``,
``provision``, ``release``, ``releasable``, ``booting``, ``interrupted``, ``endpoints`` and ``agent_key``; dispatch
releases a node only after it has been drained. Boto3 stays behind ``cloud.aws``.
"""
