"""What controller and node agent say to each other, and both state machines, without I/O.

API: ``messages`` (structs, ``encode_message``, ``decode_for_agent``, ``decode_for_controller``), ``agent_machine``
(AgentMachine: ``handle(event) -> Reaction``, ``commit(changes)``), ``controller_machine`` (ControllerMachine:
``begin``, ``handle``), ``keyfiles`` (CURVE key files and allow-lists). docs/protocol.md describes all of it.
"""
