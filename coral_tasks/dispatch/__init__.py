"""From a plan to a running fleet: observe, plan the transition, check it, carry it out, publish routing.

API: ``planner.plan_transition(plan, fleet, shapes=, situation=) -> Transition``; ``check.check_transition`` (its
independent judge); ``dispatcher.observe``, ``dispatcher.observe_fleet``, ``dispatcher.dispatch_plan``;
``routing.RoutingTable`` and its writers; ``epochs.EpochStore``; ``inventory.read_endpoints``.
"""
