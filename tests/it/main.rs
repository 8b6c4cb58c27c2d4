//! Tests across crates, and of the program as its users see it.
//!
//! One binary for every test that looks across crates, so that it is linked once.

mod architecture;
mod bad_input;
mod bench;
mod both_runners;
mod chat;
mod comparison;
mod discovery;
mod documented;
mod editor;
mod events;
mod examples;
mod faster_disks;
mod first_scenario;
mod flight;
mod gate;
mod glossary;
mod gpu;
mod interrupted;
mod json;
mod lab;
mod lab_suite;
mod lint;
mod namespace;
mod planning;
mod processes;
mod published;
mod reasons;
mod recovery;
mod relays;
mod reports;
mod repository;
mod residency;
mod returning;
mod ring_key;
mod scenario_reference;
mod scenarios;
mod serve;
mod soc;
mod sweep;
mod systems;
mod tidy;
mod whatif;
