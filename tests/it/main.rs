//! Integration tests across crates, and tests of the program through its command line.

#![allow(clippy::disallowed_methods)] // many tests measure time

mod architecture;
mod bad_input;
mod bench;
mod both_runners;
mod chat;
mod control_characters;
mod discovery;
mod documented;
mod editor;
mod events;
mod examples;
mod execute;
mod folder;
mod gpu;
mod hub;
mod init;
mod interrupted;
mod json;
mod lab;
mod lab_suite;
mod lint;
mod namespace;
mod planning;
mod processes;
mod proxy;
mod published;
mod reasons;
mod recovery;
mod rejoining;
mod relays;
mod reports;
mod repository;
mod residency;
mod ring_key;
mod scenario_reference;
mod scenarios;
mod serve;
mod soc;
mod sweep;
mod systems;
mod tidy;
mod tokenize;
mod verification;
mod whatif;
