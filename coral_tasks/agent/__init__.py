"""The node agent: a thin shell around ``protocol.agent_machine`` that owns sockets, journal and engine processes.

API: ``config.read_agent_config``/``AgentConfig``; ``server.run_agent(config)``; ``keys.make_key_pair`` and friends;
``engines.build_launch`` (command lines of ``simulated`` and ``vllm``); ``python -m
coral_tasks.agent.simulated_engine``.
Imports nothing heavy here: a simulated engine is a process of this package and must start fast.
"""
