//! One file a verb.

pub mod adopt;
pub mod cache;
pub mod checkpoint;
pub mod cool_report;
pub mod delete;
pub mod diff;
pub mod doctor;
pub mod freeze;
pub mod gc;
pub mod inspect;
pub mod ls;
pub mod manual;
pub mod migrate;
pub mod ps;
pub mod qos;
pub mod reboot;
pub mod receive;
pub mod report;
pub mod restore;
pub mod rm;
pub mod run;
pub mod stop;
pub mod thaw;
pub mod upgrade;
pub mod verify;
pub mod warm;
