//! A guest that writes faster than its pages can be sent is slowed down, step by step.

use crate::failure::{Code, Failure};
use crate::guardian::Pauses;
use dewar_guest_qemu::QemuGuest;
use dewar_kernel::{Pid, ThreadHolder};

/// The steps: hundredths of the time in which its vCPUs stand still.
const STEPS: [u8; 5] = [30, 50, 70, 80, 90];

/// The steps up to the most that is allowed; none where nothing is.
pub(super) fn steps(most: Option<u8>) -> impl Iterator<Item = u8> {
    let below = move |step: &u8| most.is_some_and(|most| *step < most);
    STEPS.into_iter().filter(below).chain(most)
}

/// Has the guardian let a guest's vCPUs stand still for so many hundredths of the time.
pub(super) fn slow_down(
    guest: &mut QemuGuest,
    pauses: &Pauses,
    percent: u8,
) -> Result<(), Failure> {
    let failed = |why: String| {
        Failure::new(Code::Unsupported, format!("the guest cannot be slowed down: {why}"))
    };
    let (process, threads) = (Pid(guest.record().process.pid), guest.vcpu_threads()?);
    for thread in &threads {
        // QEMU tells numbers of its own PID namespace.
        if !ThreadHolder::is_of(process, *thread) {
            return Err(failed("its threads have other numbers in this PID namespace".to_owned()));
        }
        // The guardian cannot say why it does not work: that is tried before it begins.
        if is_first(percent) {
            ThreadHolder::require(Pid(*thread)).map_err(|error| failed(error.to_string()))?;
        }
    }
    pauses.throttle(percent, process.0, &threads)
}

/// Whether a step is the first, whatever is allowed.
fn is_first(percent: u8) -> bool {
    percent <= STEPS[0]
}

#[cfg(test)]
mod tests {
    use super::steps;

    #[test]
    fn it_is_slowed_down_to_what_is_allowed() {
        assert_eq!(steps(None).count(), 0);
        assert_eq!(steps(Some(20)).collect::<Vec<_>>(), [20]);
        assert_eq!(steps(Some(70)).collect::<Vec<_>>(), [30, 50, 70]);
        assert_eq!(steps(Some(95)).collect::<Vec<_>>(), [30, 50, 70, 80, 90, 95]);
    }
}
